"""What RL starts from: a policy that answers, and a briefly trained draft, as Hugging Face folders cached by config hash."""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nemo_ext.config import ConfigError
from nemo_ext.drafts.kinds import Shape, kind_of
from nemo_ext.local.batch import Sample, StepPlan
from nemo_ext.local.cluster import PolicyGroup
from nemo_ext.local.hf_folder import CONFIG, read_hf_folder, save_hf_folder
from nemo_ext.local.settings import RunConfig
from nemo_ext.local.tasks import Tasks
from nemo_ext.local.tokenizer import Codec, load_tokenizer, make_tokenizer


@dataclass(frozen=True)
class Start:
    """The folders that a run starts from."""

    policy: Path
    draft: Path


def make_tasks(config: RunConfig) -> Tasks:
    return Tasks([(t.name, t.weight, t.config) for t in config.data.tasks], config.data.seed)


def initial(config: RunConfig) -> Start:
    """The folders of a run's start: those that the cache has, or untrained ones. No process is started.

    The hash covers what the folders' bytes follow from: shapes, tasks, warm-up and seeds; not the parallel layout, the
    rollouts or the RL settings, so that the three runs of `compare` share one start. Raises ConfigError for a tokenizer
    that does not load or a vocabulary that is too small.
    """
    cached = Path(config.data.warmup.cache_dir) / _hash(config)
    start = Start(cached / "policy", cached / "draft")
    if not _done(start):
        shutil.rmtree(cached, ignore_errors=True)
        _initial_folders(config, start)
    return start


def train(config: RunConfig, policy_group: PolicyGroup, start: Start, report=lambda text: None) -> None:
    """Warms the start's models up on the given ranks, unless the cache had them trained."""
    if _done(start):
        report(f"warm-up: cached in {start.policy.parent}")
        return
    _train(config, policy_group, start, report)
    (start.policy.parent / "done").touch()


def _done(start: Start) -> bool:
    return (start.policy.parent / "done").exists()


# Settings of `policy.draft` that the warm-up's bytes do not follow from.
_NOT_IN_DRAFT = {"enabled", "engine", "model_name", "trunk_residency", "trunk_budget_gb", "tap_transport"}


def _hash(config: RunConfig) -> str:
    policy, draft = config.policy, config.policy.draft
    optimizers = (policy.megatron_cfg.optimizer, draft.optimizer)
    what = {
        "model_name": _fingerprint(policy.model_name),
        "model": policy.model.model_dump() if policy.model else None,
        "data": config.data.model_dump(exclude={"warmup": {"cache_dir"}}),
        "seed": config.grpo.seed,
        "draft": draft.model_dump(exclude={*_NOT_IN_DRAFT, *draft.unread_keys, "optimizer"}),
        "optimizers": [o.model_dump(exclude={"lr", "lr_warmup_iters"}) for o in optimizers],
        "draft_model_name": _fingerprint(draft.model_name),
        "temperature": policy.generation.temperature,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _fingerprint(folder: str | None) -> list | None:
    """A folder's files by name, size and time of change."""
    if folder is None:
        return None
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    return [str(Path(folder).resolve()), *((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)]


def check_prompts(config: RunConfig, start: Start) -> None:
    """Raises ConfigError if a prompt of the run's first 512 problems leaves no room for a response."""
    generation = config.policy.generation
    codec = Codec(load_tokenizer(start.policy))
    longest = max(len(codec.prompt(p.question)) for p in make_tasks(config).problems("train", 0, 512))
    need = longest + generation.max_new_tokens
    if need > generation.vllm_cfg.max_model_len:
        raise ConfigError(
            f"policy.generation.vllm_cfg.max_model_len is {generation.vllm_cfg.max_model_len}, but prompts have up to "
            f"{longest} tokens and policy.generation.max_new_tokens is {generation.max_new_tokens}; set {need} or more"
        )


def _initial_folders(config: RunConfig, start: Start) -> None:
    """Untrained folders, or copies of the ones that the config names."""
    policy, draft = config.policy, config.policy.draft
    tasks = make_tasks(config)
    if policy.model_name:
        hf_config, tensors = read_hf_folder(policy.model_name)
        hf_config["torch_dtype"] = hf_config["dtype"] = "float32"
        save_hf_folder(start.policy, hf_config, {n: t.float() for n, t in tensors.items()}, policy.model_name)
        load_tokenizer(start.policy)
    else:
        from nemo_ext.local.hf_policy import init_policy  # loads Megatron, which a cached start does without

        questions = [p.question for p in tasks.problems("tokenizer", 0, 512)]
        tokenizer = make_tokenizer(questions, policy.model.vocab_size)
        start.policy.mkdir(parents=True)
        tokenizer.save_pretrained(start.policy)
        hf_config = policy.model.hf_config(eos_token_id=Codec(tokenizer).end_id)
        save_hf_folder(start.policy, hf_config, init_policy(hf_config, config.grpo.seed))
    kind = kind_of(draft)
    hf_config, weights = read_hf_folder(start.policy)
    if draft.model_name:
        save_hf_folder(start.draft, *kind.imported(*read_hf_folder(draft.model_name), weights))
        return
    shape = kind.fresh_shape(draft, hf_config)
    target_ids = _frequent_ids(config, start, shape) if shape.reduced_vocab else None
    head_VH = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    save_hf_folder(start.draft, shape.to_hf(), kind.fresh_tensors(shape, config.grpo.seed + 1, target_ids, head_VH))


def _below(losses: list[float], bound: float | None) -> bool:
    """Whether the mean of the last ten is."""
    return bound is not None and len(losses) >= 10 and sum(losses[-10:]) / 10 < bound


def _frequent_ids(config: RunConfig, start: Start, shape: Shape) -> torch.Tensor:
    """The ids that answers use most, ascending: the reduced vocabulary of a fresh draft."""
    codec, counts = Codec(load_tokenizer(start.policy)), Counter()
    for problem in make_tasks(config).problems("warmup", 0, 2048):
        counts.update(codec.answer(problem.answer))
    ranked = sorted(range(shape.vocab_size), key=lambda i: (-counts[i], i))
    return torch.tensor(sorted(ranked[: shape.draft_vocab_size]))


def _train(config: RunConfig, policy_group: PolicyGroup, start: Start, report) -> None:
    """Supervised steps on the tasks' answers: first the policy alone, then the draft alone on the policy as it then is."""
    warmup = config.data.warmup
    phases = [
        ("policy", 0 if config.policy.model_name else warmup.policy_steps, StepPlan("supervised", True, False)),
        ("draft", 0 if config.policy.draft.model_name else warmup.draft_steps, StepPlan("supervised", False, True)),
    ]
    if not any(steps for _, steps, _ in phases):
        return
    codec, tasks = Codec(load_tokenizer(start.policy)), make_tasks(config)
    policy_group.call("load", str(start.policy), str(start.draft), policy_lr=warmup.lr, draft_lr=warmup.draft_lr)
    drawn = 0
    for name, steps, plan in phases:
        losses: list[float] = []
        for step in range(steps):
            problems = tasks.problems("warmup", drawn, warmup.batch_size)
            drawn += len(problems)
            samples = [
                Sample(codec.prompt(p.question), answer := codec.answer(p.answer), [0.0] * len(answer))
                for p in problems
            ]
            losses.append(policy_group.call("step", samples, replace(plan, number=step))[f"{name}_loss"])
            warm = name == "policy" and _below(losses, warmup.stop_loss)
            if step % 20 == 0 or step == steps - 1 or warm:
                report(f"warm-up: {name} step {step + 1}/{steps}, loss {losses[-1]:.3f}")
            if warm:
                break
    stream = policy_group.call("export")
    _, old_draft = read_hf_folder(start.draft)
    policy_config, _ = read_hf_folder(start.policy)
    draft_config = json.loads((start.draft / CONFIG).read_text())
    save_hf_folder(start.policy, policy_config, {n: t for n, t in stream if not n.startswith("draft.")})
    trained = {n.removeprefix("draft."): t for n, t in stream if n.startswith("draft.")}
    save_hf_folder(start.draft, draft_config, {name: trained.get(name, t) for name, t in old_draft.items()})
