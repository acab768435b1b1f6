"""Synchronous GRPO: rollouts, rewards, the joint step, the refresh, until the steps are done."""

import time
from dataclasses import dataclass
from pathlib import Path

from nemo_ext.config import ConfigError
from nemo_ext.local import checkpoint, warmup
from nemo_ext.local.advantages import advantages
from nemo_ext.local.batch import Sample, StepPlan
from nemo_ext.local.cluster import Cluster, EngineHandle, PolicyGroup
from nemo_ext.local.display import Display
from nemo_ext.local.metrics_log import MetricsLog, read_settings
from nemo_ext.local.report import write_report
from nemo_ext.local.settings import RunConfig
from nemo_ext.local.tasks import Tasks
from nemo_ext.local.tokenizer import Codec, load_tokenizer


@dataclass
class Rollout:
    """What one rollout phase gave: samples with advantages, and its part of the metrics."""

    samples: list[Sample]
    metrics: dict


class Trainer:
    """The loop over already running ranks and engine.

    Args:
        config: the whole, checked run.
        policy_group, engine: the actors.
        codec, tasks: text to ids, and the problems.
    """

    def __init__(self, config: RunConfig, policy_group: PolicyGroup, engine: EngineHandle, codec: Codec, tasks: Tasks):
        self._config = config
        self._policy = policy_group
        self._engine = engine
        self._codec = codec
        self._tasks = tasks
        self.version = 0

    def refresh(self, version: int) -> float:
        """Sends policy and draft weights to the engine under `version`; seconds."""
        began = time.monotonic()
        # The stream goes from the draft's rank to the engine's process without passing through this one.
        self._engine.call("refresh", version, self._policy.lead("export"))
        self.version = version
        return time.monotonic() - began

    def rollout(self, step: int) -> Rollout:
        """Samples every prompt of the step, scores the answers, and computes advantages.

        Raises RuntimeError when the engine's weights are not this trainer's version.
        """
        grpo, generation = self._config.grpo, self._config.policy.generation
        problems = self._tasks.problems("train", step * grpo.num_prompts_per_step, grpo.num_prompts_per_step)
        prompts = [self._codec.prompt(p.question) for p in problems]
        rollouts = self._engine.call(
            "generate",
            prompts,
            n=grpo.num_generations_per_prompt,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=[self._codec.end_id],
            seed=grpo.seed * 1_000_003 + step,
        )
        if rollouts.weights_version != self.version:
            raise RuntimeError(
                f"rollouts of step {step} were made by weights version {rollouts.weights_version}, "
                f"the trainer is at version {self.version}; the refresh did not reach the engine"
            )
        groups: list[list[Sample]] = [[] for _ in prompts]
        rewards: list[list[float]] = [[] for _ in prompts]
        for item in rollouts.samples:
            groups[item.prompt].append(Sample(prompts[item.prompt], item.token_ids, item.logprobs))
            rewards[item.prompt].append(self._tasks.reward(problems[item.prompt], self._codec.text(item.token_ids)))
        scores = advantages(rewards, normalize=grpo.normalize_rewards, leave_one_out=grpo.use_leave_one_out_baseline)
        for group, values in zip(groups, scores, strict=True):
            for sample, value in zip(group, values, strict=True):
                sample.advantage = value
        flat = [reward for group in rewards for reward in group]
        accept = rollouts.accept
        metrics = {
            "reward_mean": sum(flat) / len(flat),
            "response_tokens_mean": rollouts.generated_tokens / len(flat),
            "rollout_s": rollouts.seconds,
            "rollout_tokens": rollouts.generated_tokens,
            "rollout_tokens_per_s": rollouts.generated_tokens / rollouts.seconds,
            "accepted_length": accept.accepted_length if accept else None,
            "acceptance_rate": accept.acceptance_rate if accept else None,
            "acceptance_per_position": accept.acceptance_per_position if accept else None,
        }
        return Rollout([sample for group in groups for sample in group], metrics)

    def step(self, step: int) -> dict:
        """One whole GRPO step; its metrics."""
        began = time.monotonic()
        rollout = self.rollout(step)
        trained_from = time.monotonic()
        metrics = {"step": step, **rollout.metrics}
        plan = StepPlan("grpo", train_draft=self._config.policy.draft.enabled, number=step)
        metrics |= self._policy.call("step", rollout.samples, plan)
        metrics["train_s"] = time.monotonic() - trained_from
        metrics["refresh_s"] = self.refresh(self.version + 1)
        metrics["weights_version"] = self.version
        metrics["policy_sha256"] = self._policy.call("digest")
        metrics["step_s"] = time.monotonic() - began
        return metrics


def run(config: RunConfig, report: bool = True) -> Path:
    """Trains as `config` says and returns the run's folder, with metrics, checkpoints and (unless told not to) a report.

    A run that has a checkpoint goes on from its newest one. Raises ConfigError if that run had other settings, or the
    folder cannot be made.
    """
    folder = Path(config.logger.log_dir) / config.logger.run_name
    resumed = checkpoint.latest(folder) if config.checkpointing.enabled else None
    first = checkpoint.step_of(resumed) if resumed else 0
    if resumed:
        _same_settings(config, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"logger.log_dir is {config.logger.log_dir}: {folder} cannot be made ({error.strerror}); name a folder that can "
            "be written"
        ) from None
    start = warmup.initial(config)
    warmup.check_prompts(config, start)
    with Display(config) as display, MetricsLog(folder, config) as log:
        if resumed:
            log.truncate(first)
            display.note(f"going on after step {first}: {resumed}")
        if first < config.grpo.max_num_steps:
            with Cluster() as cluster:
                _train(config, folder, cluster, start, resumed, first, display, log)
    if report:
        write_report(folder)
    return folder


def _train(
    config: RunConfig,
    folder: Path,
    cluster: Cluster,
    start: warmup.Start,
    resumed: Path | None,
    first: int,
    display: Display,
    log: MetricsLog,
) -> None:
    draft_learns = config.policy.draft.enabled
    policy_group = cluster.policy(config)
    warmup.train(config, policy_group, start, display.note)
    weights = warmup.Start(resumed / "policy", resumed / "draft") if resumed else start
    display.note("starting the vLLM engine")
    engine = cluster.engine(**engine_arguments(config, start))
    policy_group.call("load", str(weights.policy), str(weights.draft) if draft_learns else None)
    trainer = Trainer(config, policy_group, engine, Codec(load_tokenizer(start.policy)), warmup.make_tasks(config))
    engine.call("warm")
    if resumed:
        policy_group.call("restore", str(resumed))
        trainer.refresh(first)
    for step in range(first, config.grpo.max_num_steps):
        metrics = trainer.step(step)
        log.write(metrics)
        display.step(metrics)
        last = step + 1 == config.grpo.max_num_steps
        if config.checkpointing.enabled and (last or (step + 1) % config.checkpointing.save_period == 0):
            checkpoint.save(folder, step + 1, policy_group, start, keep=config.checkpointing.keep_last)
    engine.call("close")
    policy_group.call("close")


# Settings that a run may change when it goes on: they do not touch what the finished steps computed.
_FREE = {"grpo": {"max_num_steps"}, "logger": True, "checkpointing": True}


def _same_settings(config: RunConfig, folder: Path) -> None:
    before, now = read_settings(folder), config.model_dump()
    for section in now:
        free = _FREE.get(section, set())
        if free is True or not before:
            continue
        changed = _first_change(before.get(section), now[section], section, free)
        if changed:
            key, old, new = changed
            raise ConfigError(
                f"{key} is {new}, but the run in {folder} was trained with {old}; "
                "give logger.run_name another name, or the old value"
            )


def _first_change(old, new, path: str, free: set = frozenset()):
    """(key, old value, new value) of the first setting that differs, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in new:
            if key not in free and (found := _first_change(old.get(key), new[key], f"{path}.{key}")):
                return found
        return None
    return None if old == new else (path, old, new)


def engine_arguments(config: RunConfig, start: warmup.Start) -> dict:
    """Arguments of `RolloutEngine`, which starts from the warm-up's folders."""
    generation = config.policy.generation
    speculative = generation.vllm_kwargs.speculative_config
    if speculative is not None:
        speculative = {**speculative.model_dump(exclude_none=True), "model": str(start.draft)}
    return {
        "policy": str(start.policy),
        "speculative_config": speculative,
        "max_model_len": generation.vllm_cfg.max_model_len,
        "max_num_seqs": generation.vllm_cfg.max_num_seqs,
        "seed": config.grpo.seed,
        "refresh_draft": config.policy.draft.enabled,
    }
