"""Copies of the real checkout that drifted: harmlessly, and in ways in which the patches would be broken."""

import os
import re
import shutil
from pathlib import Path

import pytest

from nemo_ext import cli
from nemo_ext.nemo_rl import patching
from nemo_ext.nemo_rl.patch import facts
from nemo_ext.nemo_rl.patch.drift import described, survey
from nemo_ext.nemo_rl.patch.places import locate
from nemo_ext.nemo_rl.patch.record import RECORD
from nemo_ext.nemo_rl.patch.signature_lock import NAMES, lock_of, signature
from nemo_ext.nemo_rl.patch.source import Source
from nemo_ext.nemo_rl.patch_set import patch_sets
from tests.upstream.signatures import signatures

PRISTINE = Path(os.environ["NEMO_RL_PRISTINE"])
PATCHES = patching.recognise(PRISTINE).patches
GRPO = "nemo_rl/algorithms/grpo.py"
POLICY = "nemo_rl/models/policy/lm_policy.py"
UTILS = "nemo_rl/models/policy/utils.py"
REGISTRY = "nemo_rl/distributed/ray_actor_environment_registry.py"
ENGINE = "nemo_rl/models/generation/vllm/vllm_worker.py"
BACKEND = "nemo_rl/models/generation/vllm/vllm_backend.py"
WORKER = "nemo_rl/models/policy/workers/megatron_policy_worker.py"
DATA = "nemo_rl/distributed/batched_data_dict.py"
MEGATRON_DATA = "nemo_rl/models/megatron/data.py"
SETTINGS = "nemo_rl/models/policy/__init__.py"


@pytest.fixture
def checkout(tmp_path):
    """A copy that is recognised by no hash."""
    root = tmp_path / "RL"
    for folder in ("nemo_rl", "examples"):
        shutil.copytree(PRISTINE / folder, root / folder, symlinks=True)
    shutil.copy(PRISTINE / "pyproject.toml", root)
    for file in PATCHES.files:
        with (root / file.path).open("a") as text:
            text.write("# drifted\n")
    return root


def mutate(root: Path, path: str, after: str, pattern: str, new: str) -> None:
    """Replaces the first match of the pattern behind the first match of `after`."""
    text = (root / path).read_text()
    begin = re.search(after, text, flags=re.DOTALL).end() if after else 0
    mutated, count = re.subn(pattern, new, text[begin:], count=1, flags=re.DOTALL)
    assert count == 1, f"{path} has no {pattern}"
    (root / path).write_text(text[:begin] + mutated)


def tree(root: Path) -> dict:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def patch(action: str, root: Path, *options: str) -> int:
    return cli.main(["patch", action, "--upstream", str(root), *options])


def test_signatures_read_off_the_source_are_those_of_the_imported_functions():
    assert signatures() == {name: signature(Source(PRISTINE).find(name)) for name in NAMES}


def test_the_pinned_versions_own_folder_describes_it():
    checkout, near = Source(PRISTINE), described(PATCHES)
    assert lock_of(checkout) == near.lock
    assert list(facts.broken(checkout)) == []
    for file in PATCHES.files:
        (place,), (insertion,) = near.places[file.path], file.insertions
        found = locate(checkout.read(file.path), file.path, place, insertion.lines)
        assert found.insertion == insertion and found.same_scope and found.place == place


HARMLESS = [
    (GRPO, r"def setup\(", r"\n    policy_config =", "\n    # more\n\n    policy_config ="),
    (GRPO, r"def setup\(", r"\n    loss_config", "\n    print('set up')\n    loss_config"),
    (GRPO, r"", r"\ndef setup\(", "\ndef generation_config():\n    pass\n\n\ndef setup("),
    (POLICY, r"def __init__\(", r"tp_size = 1\n", "tp_size = 1\n        ep_size = 1\n"),
    (POLICY, r"", r"\nclass Policy\(", "\nclass Other:\n    def __init__(self):\n        pass\n\n\nclass Policy("),
    (
        UTILS,
        r"",
        r"\ndef resolve_policy",
        "\ndef another(default_cls):\n    return default_cls\n\n\ndef resolve_policy",
    ),
    (REGISTRY, r"ACTOR_ENVIRONMENT_REGISTRY[^{]*{\n", r"", '    "nemo_rl.one.One": MCORE_EXECUTABLE,\n'),
    (ENGINE, r"llm_kwargs = dict\(\n", r"", "            one=1,\n"),
    (ENGINE, r"", r"\n        self._create_engine\(", "\n        print('starts')\n        self._create_engine("),
    (WORKER, r"class MegatronPolicyWorkerImpl\(.*?\n    def ", r"", "another(self):\n        pass\n\n    def "),
    (BACKEND, r"def _load_weights\(self, weights\):\n", r"", "        # more\n"),
]


@pytest.mark.parametrize(("path", "after", "pattern", "new"), HARMLESS)
def test_a_harmless_change_is_patched_and_reverted_to_the_very_bytes(checkout, path, after, pattern, new):
    mutate(checkout, path, after, pattern, new)
    before = tree(checkout)
    assert patch("check", checkout) == 1
    assert patch("apply", checkout) == 2
    assert patch("apply", checkout, "--accept-drift") == 0
    after = tree(checkout)
    assert {name for name in after if after[name] != before.get(name)} == {file.path for file in PATCHES.files} | {
        RECORD
    }
    lines = {file.path: {line for one in file.insertions for line in one.lines} for file in PATCHES.files}
    for name, inserted in lines.items():
        compile(after[name], name, "exec")
        gained = set(after[name].decode().splitlines()) - set(before[name].decode().splitlines())
        assert gained == inserted - {""} - set(before[name].decode().splitlines())
    assert patch("check", checkout) == 0
    assert patch("revert", checkout) == 0
    assert tree(checkout) == before


SETUP = r"def setup\(.*?\n    policy_config = "
DRAFT = r"draft_enabled = bool\("
BROKEN = [
    # Patch 1, the run
    (GRPO, "", r"def setup\(", "def set_up("),
    (GRPO, "", r"\ndef setup\(", "\nasync def setup("),
    (GRPO, "", r"\ndef setup\(", "\n@ready\nclass Setup:\n    pass\n\n\nsetup = Setup()\n\n\ndef setup("),
    (GRPO, r"def setup\(", r"master_config: MasterConfig", "main_config: MasterConfig"),
    (GRPO, r"def setup\(", r"tokenizer:", "required, tokenizer:"),
    (GRPO, r"def setup\(", r"policy_config = master_config.policy", "policy_config = dict(master_config.policy)"),
    (GRPO, r"def setup\(", r"    policy_config = [^\n]*\n", ""),
    (GRPO, SETUP, r"\n    generation_config = [^\n]*\n", "\n"),
    (GRPO, SETUP, r"\n    (generation_config = [^\n]*)\n", r"\n    if policy_config:\n        \1\n"),
    (GRPO, SETUP, r"\n    (generation_config = [^\n]*)\n", r"\n    with timer():\n        \1\n"),
    (GRPO, SETUP, r"\n    loss_config", "\n    policy_config = dict(policy_config)\n    loss_config"),
    (GRPO, r"def setup\(", r"\n    policy_config =", "\n    check(master_config)\n    policy_config ="),
    (
        GRPO,
        r"def setup\(",
        r"\n    policy_config =",
        "\n    if tokenizer is None:\n        return\n    policy_config =",
    ),
    (GRPO, SETUP, r"\n    loss_config", '\n    assert not policy_config["draft"]["enabled"]\n    loss_config'),
    (GRPO, "class MasterConfig", r"checkpointing: CheckpointingConfig", "checkpointing: dict[str, Checkpointing]"),
    ("nemo_rl/utils/checkpoint.py", "", r"CheckpointingConfig\(TypedDict\)", "CheckpointingConfig(BaseModel)"),
    ("examples/run_grpo.py", "def main", r"= setup\(", "= prepare("),
    # Patch 2, the policy
    (POLICY, r"class Policy\(.*?def __init__\(", r"config: PolicyConfig", "settings: PolicyConfig"),
    (POLICY, "", DRAFT, "draft_on = bool("),
    (POLICY, "", DRAFT, "draft_enabled = all("),
    (POLICY, DRAFT, r"\n        if draft_enabled(.*?)if draft_enabled ", r"\n        if True\1if True "),
    (
        POLICY,
        DRAFT,
        r"\n        if draft_enabled",
        '\n        draft_enabled = "draft" in config\n        if draft_enabled',
    ),
    (POLICY, DRAFT, r"\n        if megatron_enable", '\n        check(config["draft"])\n        if megatron_enable'),
    (POLICY, r"class Policy\(", r"resolve_policy_worker_cls\(", "first("),
    (POLICY, r"class Policy\(.*?RayWorkerBuilder\(\s*worker_builder_cls_fqn,\s*", r"config", "dict(config)"),
    ("nemo_rl/models/generation/vllm/vllm_generation.py", r"RayWorkerBuilder\(", r"config\b", "plain(config)"),
    (GRPO, r"def setup\(.*?VllmGeneration\(", r"config=generation_config", "config=plain(generation_config)"),
    (GRPO, r"def setup\(.*?_make_policy\(", r"config=policy_config", "config=dict(policy_config)"),
    (POLICY, r"    def train\(", r'"train",', '"train_step",'),
    # Patch 3, the worker's class
    (UTILS, r"def resolve_policy_worker_cls", r"return default_cls\n", "return worker(default_cls)\n"),
    (UTILS, "", r"def resolve_policy_worker_cls\(default_cls: str,", "def resolve_policy_worker_cls(default: str,"),
    (
        UTILS,
        "",
        r"\ndef resolve_policy_worker_cls",
        "\nresolve_policy_worker_cls = None\n\n\ndef resolve_policy_worker_cls",
    ),
    (UTILS, r"def get_runtime_env_for_policy_worker\(", "", "environment, "),
    # Patch 4, its environment
    (REGISTRY, "", r'(\.MegatronPolicyWorker": )MCORE_EXECUTABLE', r"\1PY_EXECUTABLES.MCORE"),
    (REGISTRY, "", r'\.MegatronPolicyWorker"', '.MegatronWorker"'),
    (REGISTRY, "", r"\nMCORE_EXECUTABLE = ", "\nMCORE_EXECUTABLE = VLLM_EXECUTABLE\nOTHER_EXECUTABLE = "),
    (REGISTRY, "", r"\nACTOR_ENVIRONMENT_REGISTRY: dict\[str, str\] = {", "\nENVIRONMENTS: dict[str, str] = {"),
    (REGISTRY, r"\nACTOR_ENVIRONMENT_REGISTRY[^}]*\n}\n", "", "ACTOR_ENVIRONMENT_REGISTRY |= {}\n"),
    (
        REGISTRY,
        "def get_actor_python_env",
        r"ACTOR_ENVIRONMENT_REGISTRY(.*)ACTOR_ENVIRONMENT_REGISTRY\[",
        r"OTHER\1OTHER[",
    ),
    # Patch 5, the engine
    (
        ENGINE,
        "",
        r"\n        self._create_engine\(llm_kwargs\)\n",
        "\n        self._create_engine(llm_kwargs)" * 2 + "\n",
    ),
    (ENGINE, "", r"\n        (self._create_engine\(llm_kwargs\))\n", r"\n        if self.cfg:\n            \1\n"),
    (ENGINE, "", r"\n        self._create_engine\(llm_kwargs\)\n", "\n        self._create_engine(dict(llm_kwargs))\n"),
    (
        ENGINE,
        "",
        r"\n        self._create_engine\(",
        "\n        self.arguments = llm_kwargs\n        self._create_engine(",
    ),
    (
        ENGINE,
        "",
        r"\n        self._create_engine\(",
        "\n        llm_kwargs = only(llm_kwargs)\n        self._create_engine(",
    ),
    (ENGINE, "", r"llm_kwargs = dict\(", "llm_kwargs = Arguments("),
    (ENGINE, r"llm_kwargs = dict\(", r"worker_extension_cls=", "worker_extension="),
    (ENGINE, r"llm_kwargs = dict\(", r"load_format=", "loading="),
    (ENGINE, r"llm_kwargs = dict\(", r"VllmInternalWorkerExtension\"", 'VllmExtension"'),
    (ENGINE, r"def _init_config\(", r"self\.cfg = config", "self.settings = config"),
    (ENGINE, "", r"    def _load_model\(self", "    @staticmethod\n    def _load_model(self"),
    (ENGINE, r"collective_rpc\(\s*", r'"update_weights_via_ipc_zmq"', '"update_weights"'),
    # What is overridden or called
    (BACKEND, "", r"def _load_weights\(self, weights", "def _load_bucket(self, weights"),
    (BACKEND, "", r"def update_weights_via_ipc_zmq\(self", "def update_weights_via_ipc_zmq(self, version"),
    (BACKEND, r"def update_weights_via_ipc_zmq", r"self\._load_weights\(", "self._load_bucket("),
    (BACKEND, r"def update_weights_from_collective", r"self\._load_weights", "self._load_bucket"),
    (BACKEND, r"def update_weights_from_collective", r"return True\n", "return len(self.state_dict_info)\n"),
    (BACKEND, r"def prepare_refit_info\(.*?self\.state_dict_info = ", r"state_dict_info", "dict(state_dict_info)"),
    (WORKER, r"    def train\(\n", r"loss_fn", "required, loss_fn"),
    (WORKER, "", r"    def train\(\n", "    @cached\n    def train(\n"),
    (WORKER, "", r"    def move_model\(", "    def move(self):\n        pass\n\n    def move_model_to("),
    (WORKER, r"def move_optimizer\(self, ", "", "required, "),
    (WORKER, "", r"def save_checkpoint\(", "def write_checkpoint("),
    (WORKER, r"    def train\(\n", r"\"all_mb_metrics\"", '"mb_metrics"'),
    (WORKER, r"def stream_weights_via_ipc_zmq", r"self\._iter_params_with_optional_kv_scales", "self._iter_params"),
    (
        WORKER,
        r"def broadcast_weights_for_collective",
        r"self\._iter_params_with_optional_kv_scales",
        "self._iter_params",
    ),
    (WORKER, r"    def prepare_refit_info", r"\(tensor\.shape, tensor\.dtype\)", "(tensor.dtype, tensor.shape)"),
    (WORKER, r"    def __init__\(", r"self\.sampling_params = ", "self.sampling = "),
    (WORKER, r"    def train\(", r"self\.optimizer\.step\(", "self.step("),
    (WORKER, r"    def offload_before_refit", r"self\.move_optimizer\(", "self.drop_optimizer("),
    (DATA, r"def get_batch\(", r"return ", "return dict() and "),
    (DATA, "", r"def make_microbatch_iterator\(", "def make_microbatches("),
    (
        MEGATRON_DATA,
        r"def _get_pack_sequence_parameters_for_megatron\(",
        r"\b128\b\)\n        elif",
        "256)\n        elif",
    ),
    (
        MEGATRON_DATA,
        r"\ndef get_microbatch_iterator\(",
        r"make_microbatch_iterator\(mbs\)",
        "make_microbatch_iterator(2)",
    ),
    ("nemo_rl/models/megatron/train.py", r"\ndef model_forward\(", r"\binput_ids=", "tokens="),
    (SETTINGS, "class PolicyConfig", r"\n    make_sequence_length_divisible_by:", "\n    sequence_multiple:"),
    (
        SETTINGS,
        "class MegatronConfig\\(",
        r"\n    use_(linear_ce_fusion_loss|fused_linear_logprobs):",
        "\n    use_fused:",
    ),
    (
        "nemo_rl/models/value/lm_value.py",
        "",
        r"\nclass ",
        '\ndef reads(config):\n    return config["draft"]\n\n\nclass ',
    ),
]


@pytest.mark.parametrize(("path", "after", "pattern", "new"), BROKEN)
def test_a_change_that_would_break_the_patches_is_refused(checkout, capsys, path, after, pattern, new):
    mutate(checkout, path, after, pattern, new)
    compile((checkout / path).read_bytes(), path, "exec")
    found = survey(checkout, patch_sets())
    assert found.troubles and not found.fits
    before = {file.path: (checkout / file.path).read_bytes() for file in PATCHES.files}
    assert patch("apply", checkout, "--accept-drift") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nor do the patches fit it as it is" in error
    assert {name: (checkout / name).read_bytes() for name in before} == before and not (checkout / RECORD).exists()


def test_another_vllm_is_refused(checkout):
    text = (checkout / "pyproject.toml").read_text()
    (checkout / "pyproject.toml").write_text(re.sub(r"vllm(==|-)0\.2[05]\.", r"vllm\g<1>9.9.", text))
    assert "drafts were tried with" in survey(checkout, patch_sets()).troubles[0]
