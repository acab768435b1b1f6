"""Upstream's Megatron policy worker on CPU ranks, with and without the draft.

The worker is made past its `__init__`, which needs NCCL, a GPU and a downloaded model; every method that runs afterwards
is upstream's own.
"""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from tests.upstream import fake_cuda  # noqa: F401  (before upstream)

# isort: split
import nemo_rl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.workers import megatron_policy_worker as upstream_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from nemo_rl.utils.timer import Timer
from omegaconf import OmegaConf

from nemo_ext.local.hf_folder import read_hf_folder, save_hf_folder
from nemo_ext.local.hf_policy import policy_digest
from nemo_ext.local.parallel import ParallelSizes, destroy_parallel, init_parallel
from nemo_ext.nemo_rl.policy_worker import DraftPolicyWorkerImpl, without_draft
from tests.upstream import tiny_policy

UPSTREAM = Path(nemo_rl.__file__).parents[1]


def master_config(overrides: dict) -> dict:
    """Upstream's `grpo_math_1B.yaml` with nested overrides, as plain data."""
    register_omegaconf_resolvers()
    config = OmegaConf.merge(load_config(UPSTREAM / "examples/configs/grpo_math_1B.yaml"), overrides)
    return OmegaConf.to_container(config, resolve=True)


def policy_settings(policy_folder: str, draft: dict, *, sizes: dict, **policy) -> dict:
    """`policy` of a run; `sizes` has tp, pp, cp, and `draft` is `policy.draft`."""
    megatron = {
        "enabled": True,
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "context_parallel_size": sizes.get("cp", 1),
        "sequence_parallel": sizes.get("sp", False),
        "activation_checkpointing": sizes.get("recompute", False),
        "empty_unused_memory_level": 0,
    }
    base = {
        "model_name": policy_folder,
        "precision": "float32",
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": megatron,
        "draft": draft,
        "generation": {"temperature": policy.pop("temperature", 1.0)},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 64,
    }
    return master_config({"policy": base | policy})["policy"]


class TinyWorker:
    """One rank: upstream's worker class `kind` over a tiny policy.

    Args:
        policy: its settings, from `policy_settings`.
        dp: data-parallel size.
        kind: `draft` for this package's subclass, `upstream` for upstream's own.
        checkpoint: (weights path, optimizer path) to resume the draft from.
        distributed: a distributed optimizer that overlaps its communication, as NeMo-RL's recipes have it.
    """

    def __init__(
        self,
        policy: dict,
        *,
        dp: int = 1,
        kind: str = "draft",
        checkpoint: tuple = (None, None),
        distributed: bool = False,
    ):
        megatron = policy["megatron_cfg"]
        init_parallel(
            ParallelSizes(
                tp=megatron["tensor_model_parallel_size"],
                pp=megatron["pipeline_model_parallel_size"],
                cp=megatron["context_parallel_size"],
                dp=dp,
            ),
            seed=0,
        )
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.hf_config, tensors = read_hf_folder(policy["model_name"])
        cls = DraftPolicyWorkerImpl if kind == "draft" else MegatronPolicyWorkerImpl
        worker = object.__new__(cls)
        model, optimizer, schedule = tiny_policy.build(
            self.hf_config,
            tensors,
            self.groups,
            sequence_parallel=megatron["sequence_parallel"],
            recompute=megatron["activation_checkpointing"],
            lr=1e-3,
            distributed=distributed,
        )
        worker.__dict__.update(
            cfg=without_draft(policy) if kind == "draft" else policy,
            model=model,
            optimizer=optimizer,
            scheduler=schedule,
            megatron_bridge=tiny_policy.LocalBridge(self.hf_config, self.groups),
            megatron_cfg=SimpleNamespace(
                optimizer=SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=False),
                ddp=SimpleNamespace(overlap_param_gather=distributed),
            ),
            mcore_state=SimpleNamespace(
                straggler_timer=None,
                cfg=SimpleNamespace(checkpoint=SimpleNamespace(save=None, async_save=False)),
                train_state=mock.Mock(),
            ),
            checkpointing_context={},
            sampling_params=TrainingSamplingParams(
                top_k=None, top_p=1.0, temperature=policy["generation"]["temperature"]
            ),
            draft_model=None,
            refit_conversion_tasks=None,
            dtype=torch.float32,
            dp_size=dp,
            rank=dist.get_rank(),
            fp8_cfg=None,
            defer_fp32_logits=False,
            delegate_pack_to_model=False,
            delegate_mtp_loss_mask_to_model=False,
            model_slices_context_parallel_inputs=False,
            media_placeholder_token_id=None,
            should_disable_forward_pre_hook=distributed,
            optimizer_cpu_offload=False,
            _first_train_step_forward_pre_hook_disabled=False,
            _first_train_step_param_sync_func=None,
            _router_replay_enabled=False,
            timer=Timer(),
        )
        self.worker, self._policy, self._dp = worker, policy, dp
        self.finalize = get_model_config(model).finalize_model_grads_func
        if distributed:
            MegatronPolicyWorkerImpl._disable_forward_pre_hook_until_next_train_step(worker)  # as its __init__ ends
        if kind == "draft":
            worker._add_draft(policy, *checkpoint, train=True)

    def train(self, batch: dict, loss: dict | None = None, gbs: int | None = None) -> dict:
        """One call of the worker's own `train` on this rank's share of the whole batch."""
        return self.worker.train(self.share(batch, gbs), loss_function(loss), gbs=gbs)

    def share(self, batch: dict, gbs: int | None = None) -> BatchedDataDict:
        """What `Policy.train` sends to this rank."""
        policy, gbs = self._policy, gbs or self._policy["train_global_batch_size"]
        data = BatchedDataDict(batch)
        rank, _ = tiny_policy.dp_rank_and_size()
        if policy["sequence_packing"]["enabled"]:
            packing = {
                "algorithm": policy["sequence_packing"]["algorithm"],
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "sequence_length_pad_multiple": policy["make_sequence_length_divisible_by"],
                "max_tokens_per_microbatch": policy["sequence_packing"]["train_mb_tokens"],
            }
            return data.shard_by_batch_size(self._dp, batch_size=gbs, sequence_packing_args=packing)[0][rank]
        if policy["dynamic_batching"]["enabled"]:
            dynamic = {
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "sequence_length_round": policy["dynamic_batching"]["sequence_length_round"],
                "max_tokens_per_microbatch": policy["dynamic_batching"]["train_mb_tokens"],
            }
            return data.shard_by_batch_size(self._dp, batch_size=gbs, dynamic_batching_args=dynamic)[0][rank]
        return data.shard_by_batch_size(self._dp, batch_size=gbs)[rank]

    def digest(self) -> str:
        """SHA-256 of the policy's full weights."""
        return policy_digest(self.worker.megatron_bridge.export_hf_weights([self.worker.model]))

    def save_policy(self, folder: Path) -> None:
        """The policy as it is, as a Hugging Face folder."""
        tensors = dict(self.worker.megatron_bridge.export_hf_weights([self.worker.model]))
        if dist.get_rank() == 0:
            save_hf_folder(folder, self.hf_config, tensors)
        dist.barrier()

    def draft_weights(self) -> dict[str, torch.Tensor]:
        """The draft's part of a refit's stream, whole on every rank."""
        with torch.no_grad():
            stream = self.worker._iter_params_with_optional_kv_scales()
            return {name: t.clone() for name, t in stream if name.startswith("draft.")}

    def save_checkpoint(self, weights_path: str) -> None:
        """The worker's own; where Megatron-Bridge would write the policy, its configuration is looked at."""
        seen = []

        def write(state, model, **kwargs):
            seen.append(get_model_config(model[0]).finalize_model_grads_func)

        with mock.patch.multiple(upstream_worker, save_checkpoint=write, maybe_finalize_async_save=mock.DEFAULT):
            self.worker.save_checkpoint(weights_path, optimizer_path=weights_path)
        assert seen[0] is self.finalize, "upstream writes functions into checkpoints; they must be its own"

    def draft_bytes(self) -> int:
        """Memory of the draft's parameters on this rank's device."""
        draft = self.worker._draft.draft
        return 0 if draft is None else sum(p.untyped_storage().nbytes() for p in draft.parameters())

    def close(self) -> None:
        if getattr(self.worker, "_draft", None) is not None:
            self.worker._draft.close()
        destroy_parallel()


def loss_function(overrides: dict | None = None) -> ClippedPGLossFn:
    """Upstream's own GRPO loss."""
    return ClippedPGLossFn(ClippedPGLossConfig(**master_config({"loss_fn": overrides or {}})["loss_fn"]))


def grpo_batch(lengths: list[int], prompt: int, *, seed: int, vocab: int, width: int) -> dict[str, torch.Tensor]:
    """A batch as `grpo_train` hands it to the policy: `[B, width]` ids with the fields of the clipped loss."""
    generator = torch.Generator().manual_seed(seed)
    size = len(lengths)
    ids = torch.zeros(size, width, dtype=torch.long)
    mask = torch.zeros(size, width)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, vocab, (length,), generator=generator)
        mask[row, prompt:length] = 1
    noise = torch.randn(size, width, generator=generator)
    return {
        "input_ids": ids,
        "input_lengths": torch.tensor(lengths),
        "token_mask": mask,
        "sample_mask": torch.ones(size),
        "advantages": torch.randn(size, 1, generator=generator).expand(size, width).clone(),
        "prev_logprobs": -3 + 0.1 * noise,
        "generation_logprobs": -3 + 0.1 * noise,
        "reference_policy_logprobs": -3 + 0.1 * noise,
    }
