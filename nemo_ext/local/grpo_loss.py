"""GRPO's clipped policy-gradient loss, in NeMo-RL's terms.

Legend: T rows of this rank, V this rank's shard of the vocabulary.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from nemo_ext.local.batch import Microbatch


def token_log_probs(logits_1TV: torch.Tensor, labels_T: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability of each label under `softmax(logits / temperature)`, over a vocabulary sharded by Megatron. `[T]`."""
    logits_T1V = logits_1TV.transpose(0, 1).float() / temperature
    return -vocab_parallel_cross_entropy(logits_T1V.contiguous(), labels_T[:, None]).squeeze(1)


@dataclass
class PolicyLoss:
    """`loss` is this microbatch's share of the global token mean; the sums are detached, over this rank's rows."""

    loss: torch.Tensor
    loss_sum: torch.Tensor
    ratio_sum: torch.Tensor
    clipped_sum: torch.Tensor
    kl_sum: torch.Tensor  # sampler against policy, mean-free estimate exp(d) - 1 - d

    def sums(self) -> torch.Tensor:
        return torch.stack([self.loss_sum, self.ratio_sum, self.clipped_sum, self.kl_sum])


def grpo_loss(
    log_prob_T: torch.Tensor, microbatch: Microbatch, *, clip_min: float, clip_max: float, tokens: float
) -> PolicyLoss:
    """`-sum_t min(r A, clip(r, 1 - clip_min, 1 + clip_max) A) / tokens`, with `r` against the sampler's log-probabilities.

    `tokens` is the number of trained-on tokens in the global batch.
    """
    mask_T = microbatch.next_token(microbatch.label_mask_R)
    advantage_T = microbatch.next_token(microbatch.advantage_R)
    difference_T = torch.where(mask_T > 0, log_prob_T - microbatch.next_token(microbatch.sampler_log_prob_R), 0.0)
    ratio_T = difference_T.exp()
    clipped_T = ratio_T.clamp(1 - clip_min, 1 + clip_max)
    row_loss_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T) * mask_T
    with torch.no_grad():
        kl_T = ((-difference_T).exp() - 1 + difference_T) * mask_T
        outside_T = (ratio_T != clipped_T).float() * mask_T
    total = row_loss_T.sum()
    return PolicyLoss(total / tokens, total.detach(), (ratio_T.detach() * mask_T).sum(), outside_T.sum(), kl_T.sum())


def supervised_loss(log_prob_T: torch.Tensor, microbatch: Microbatch, *, tokens: float) -> PolicyLoss:
    """Negative log-likelihood of the answer tokens: the warm-up."""
    total = -(log_prob_T * microbatch.next_token(microbatch.label_mask_R)).sum()
    zero = total.detach() * 0
    return PolicyLoss(total / tokens, total.detach(), zero, zero, zero)
