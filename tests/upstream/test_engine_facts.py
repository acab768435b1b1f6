"""What this package relies on in the pinned engine: held by reading its installed Python as text.

The other tests run the engine on a CPU, where graphs, real devices and processes of their own are missing; these say why it
does there what it does. Each fact is a test of its own, which fails when the source says something else.
`NEMO_EXT_ENGINE_SOURCE` as in `test_engine_families.py`.
"""

import ast
from pathlib import Path

import pytest

from nemo_ext.nemo_rl.config import upstream_version
from nemo_ext.nemo_rl.support import MAIN, V070
from tests.upstream.test_engine_families import vllm  # noqa: F401  (a fixture)

V2 = "v1/worker/gpu/"
# Version, fact, file, function, and what its code says, as ast.unparse writes it.
FACTS = [
    (V070, "the V1 runner is what serves", "envs.py", "", ["VLLM_USE_V2_MODEL_RUNNER: bool = False"]),
    (V070, "a draft model is at drafter.model", "v1/spec_decode/llm_base_proposer.py", "load_model", ["self.model = "]),
    (
        V070,
        "EAGLE's key is read first, and names taps by the layers before them",
        "v1/worker/gpu_model_runner.py",
        "_get_eagle3_aux_layers_from_config",
        ["'eagle_aux_hidden_state_layer_ids', None)\n    if not layer_ids:"],
    ),
    (V070, "EAGLE-3 takes three taps", "model_executor/models/llama_eagle3.py", "__init__", ["hidden_size * 3"]),
    (V070, "DFlash is two-sided", "v1/spec_decode/dflash.py", "set_inputs_first_pass", ["causal=False"]),
    (V070, "there is no DSpark", "config/speculative.py", "", [("not", "dspark")]),
    (MAIN, "DSpark is served by the V2 runner", "config/vllm.py", "use_v2_model_runner", ["method == 'dspark'"]),
    (
        MAIN,
        "the V2 runner keeps the speculator",
        V2 + "model_runner.py",
        "__init__",
        ["self.speculator = init_speculator"],
    ),
    (
        MAIN,
        "a speculator's draft is its model",
        V2 + "spec_decode/speculator.py",
        "load_model",
        ["self.model = self.load"],
    ),
    (
        MAIN,
        "EAGLE's key is read first by V2 as well",
        V2 + "spec_decode/eagle/eagle3_utils.py",
        "get_eagle3_aux_layers_from_config",
        ["'eagle_aux_hidden_state_layer_ids', None)\n    if not layer_ids:"],
    ),
    (
        MAIN,
        "DSpark is two-sided whatever its config says",
        V2 + "spec_decode/dspark/speculator.py",
        "__init__",
        ["self.dflash_causal = False"],
    ),
    (
        MAIN,
        "DSpark draws from the anchor unless the config says otherwise",
        V2 + "spec_decode/dspark/speculator.py",
        "__init__",
        ["not getattr(self.draft_model_config.hf_config, 'dspark_bonus_anchor', False)"],
    ),
    (
        MAIN,
        "DSpark adds the Markov bias of the token before, slot by slot",
        V2 + "spec_decode/dspark/speculator.py",
        "_sample_sequential",
        ["self.model.markov_embed(prev)", "base_logits[:, i] + bias", "prev = draft_sampled_i"],
    ),
    (
        MAIN,
        "the Markov bias is scaled as the logits are",
        "model_executor/models/qwen3_dspark.py",
        "markov_bias",
        ["self.logits_processor)"],
    ),
    (
        MAIN,
        "a DSpark refit needs one call: it rebuilds what is derived, and skips the confidence head",
        "model_executor/models/qwen3_dspark.py",
        "load_weights",
        ["'confidence_head'", "self.model._build_fused_kv_buffers()"],
    ),
    (
        MAIN,
        "DFlash on V2 is causal as dflash_config says, and else is not",
        V2 + "spec_decode/dflash/utils.py",
        "get_dflash_causal",
        [".get('causal', False)"],
    ),
    (
        MAIN,
        "a mixture of windows and full attention is refused",
        "model_executor/models/qwen3_dflash.py",
        "_resolve_layer_attention",
        ["any_sliding and (not all_sliding)", "raise NotImplementedError"],
    ),
    (
        MAIN,
        "a head of the draft's own is kept apart unless it equals the policy's",
        V2 + "spec_decode/dspark/utils.py",
        "load_dspark_model",
        ["'has_own_lm_head', draft_lm_head, target_lm_head)", "draft_model.lm_head = target_lm_head"],
    ),
    (
        MAIN,
        "EAGLE-3 counts its taps and has the EAGLE-3.1 flags",
        "model_executor/models/llama_eagle3.py",
        "__init__",
        ["'num_aux_hidden_states', None)", "'fc_norm', False)", "'norm_output', False)"],
    ),
]


OF_THIS_VERSION = [fact for fact in FACTS if fact[0] == upstream_version()]
assert OF_THIS_VERSION


@pytest.mark.parametrize(
    ("version", "fact", "path", "function", "says"), OF_THIS_VERSION, ids=[fact[1] for fact in OF_THIS_VERSION]
)
def test_the_engine_says(vllm, version, fact, path, function, says):  # noqa: F811
    code = "\n".join(source(vllm / path, function))
    for fragment in says:
        if isinstance(fragment, tuple):
            assert fragment[1] not in code, fact
        else:
            assert fragment in code, fact


def source(file: Path, function: str) -> list[str]:
    """The code of every function of that name in a file, or the whole file's; without comments and docstrings."""
    tree = ast.parse(file.read_text())
    if not function:
        return [ast.unparse(tree)]
    named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    assert named, f"{file} has no {function}"
    return [ast.unparse(node) for node in named]
