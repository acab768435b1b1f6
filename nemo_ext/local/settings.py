"""The YAML of a CPU run, in NeMo-RL's own shape and with its names where it has them (checks: `settings_checks`)."""

from typing import Any, Literal

from pydantic import Field, field_validator

from nemo_ext.config import DraftConfig, Section


class ModelShape(Section):
    """`policy.model`: a fresh Qwen3-shaped policy, used when `policy.model_name` is null."""

    vocab_size: int = Field(ge=2)  # the tokenizer is made to have exactly as many tokens
    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    tie_word_embeddings: bool = False
    rope_theta: float = Field(10000.0, gt=1)
    max_position_embeddings: int = Field(512, ge=1)

    def hf_config(self, eos_token_id: int) -> dict:
        """The policy's `config.json`, for transformers 4 and 5 alike."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **self.model_dump(),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "torch_dtype": "float32",
        }


class MegatronOptimizer(Section):
    """`policy.megatron_cfg.optimizer`: Adam of the policy."""

    lr: float = Field(gt=0)
    weight_decay: float = Field(0.01, ge=0)
    clip_grad: float = Field(1.0, gt=0)  # of the policy's own gradient norm
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)


class MegatronScheduler(Section):
    """`policy.megatron_cfg.scheduler`: the learning rate is constant after its warm-up."""

    lr_warmup_iters: int = Field(0, ge=0)  # optimizer steps over which lr rises from 0


class MegatronConfig(Section):
    """`policy.megatron_cfg`: how ranks split the policy, and its optimizer."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=2)  # model chunks a stage, interleaved
    context_parallel_size: int = Field(1, ge=1)
    sequence_parallel: bool = False
    activation_checkpointing: bool = False  # recompute every layer in the backward
    optimizer: MegatronOptimizer
    scheduler: MegatronScheduler = Field(default_factory=MegatronScheduler)

    @property
    def model_ranks(self) -> int:
        """Ranks that one replica of the policy takes."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class SequencePacking(Section):
    """`policy.sequence_packing`: several sequences a microbatch, end to end, instead of padding them to one length."""

    enabled: bool = True
    train_mb_tokens: int = Field(2048, ge=1)  # rows of one microbatch; read when enabled


class SpeculativeConfig(Section):
    """`policy.generation.vllm_kwargs.speculative_config`: vLLM's own keys. The draft folder is the run's."""

    method: Literal["eagle3", "dflash", "dspark"]
    num_speculative_tokens: int = Field(ge=1)
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    model: str | None = None  # null: the draft that the run trains or warms up


class VllmKwargs(Section):
    """`policy.generation.vllm_kwargs`. No `speculative_config`: rollouts without a draft."""

    speculative_config: SpeculativeConfig | None = None


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`."""

    max_model_len: int = Field(ge=2)  # longest prompt plus response, in tokens
    max_num_seqs: int = Field(32, ge=1)  # sequences decoded together


class GenerationConfig(Section):
    """`policy.generation`: how rollouts are sampled."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(ge=1)
    vllm_cfg: VllmConfig
    vllm_kwargs: VllmKwargs = Field(default_factory=VllmKwargs)


class PolicyConfig(Section):
    """`policy`. Give `model_name` (a Hugging Face folder of a Qwen3 policy) or `model` (a fresh one)."""

    model_name: str | None = None
    model: ModelShape | None = None
    precision: Literal["float32"] = "float32"
    train_global_batch_size: int = Field(ge=1)  # samples of one optimizer step: all rollouts of a GRPO step
    train_micro_batch_size: int = Field(8, ge=1)  # sequences of one microbatch; read when packing is off
    max_total_sequence_length: int = Field(ge=2)
    sequence_packing: SequencePacking = Field(default_factory=SequencePacking)
    megatron_cfg: MegatronConfig
    draft: DraftConfig = Field(default_factory=DraftConfig)
    generation: GenerationConfig


class GrpoConfig(Section):
    """`grpo`."""

    num_prompts_per_step: int = Field(ge=1)
    num_generations_per_prompt: int = Field(ge=2)  # one answer alone has no group to be compared with
    max_num_steps: int = Field(ge=1)
    normalize_rewards: bool = True  # divide advantages by the group's standard deviation
    use_leave_one_out_baseline: bool = True
    seed: int = Field(42, ge=0, lt=2**31)


class LossConfig(Section):
    """`loss_fn`: the importance ratio against the sampler is clipped to [1 - min, 1 + max]."""

    ratio_clip_min: float = Field(0.2, gt=0, lt=1)
    ratio_clip_max: float = Field(0.2, gt=0)


class TaskConfig(Section):
    """One reasoning-gym task family: its name, its share of the problems, and its own settings."""

    name: str
    weight: float = Field(1.0, gt=0)
    config: dict[str, Any] = Field(default_factory=dict)


class WarmupConfig(Section):
    """`data.warmup`: supervised steps on the tasks' answers, first of the policy, then of the draft; cached."""

    policy_steps: int = Field(ge=0)  # at most, if stop_loss is set
    stop_loss: float | None = Field(None, gt=0)  # the policy is warm once 10 steps' mean loss per token, nats, is below
    draft_steps: int = Field(ge=0)
    batch_size: int = Field(ge=1)
    lr: float = Field(1e-3, gt=0)
    draft_lr: float = Field(1e-3, gt=0)
    cache_dir: str = ".cache/warmup"


class DataConfig(Section):
    """`data`: problems are a function of the seed and their number."""

    tasks: list[TaskConfig] = Field(min_length=1)
    seed: int = Field(42, ge=0, lt=2**27)
    warmup: WarmupConfig


class LoggerConfig(Section):
    """`logger`: a run lies in `log_dir/run_name`."""

    log_dir: str = Field("runs", min_length=1)
    run_name: str = Field(min_length=1)
    tensorboard_enabled: bool = True

    @field_validator("run_name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        if "/" in value or value in (".", ".."):
            raise ValueError(f"run_name is {value}; name one folder, which will be inside logger.log_dir")
        return value


class CheckpointConfig(Section):
    """`checkpointing`: a run that is started again goes on from its newest checkpoint."""

    enabled: bool = True
    save_period: int = Field(10, ge=1)  # steps; the last step is always saved
    keep_last: int = Field(2, ge=1)


class ClusterConfig(Section):
    """`cluster`."""

    gpus_per_node: int = Field(1, ge=1, le=256)  # policy ranks; here each is a CPU process


class RunConfig(Section):
    """The whole file."""

    policy: PolicyConfig
    grpo: GrpoConfig
    loss_fn: LossConfig = Field(default_factory=LossConfig)
    data: DataConfig
    logger: LoggerConfig
    checkpointing: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
