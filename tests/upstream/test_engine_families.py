"""The table of policy families against the pinned engine's own source, read as text: vLLM itself is never imported.

`NEMO_EXT_ENGINE_SOURCE` is the folder that has the unpacked `vllm/` of the version under test.
"""

import ast
import os
from functools import cache
from pathlib import Path

import pytest

from nemo_ext.drafts.block_config import ARCHITECTURES
from nemo_ext.nemo_rl.config import upstream_version
from nemo_ext.nemo_rl.families import ENGINES, FAMILIES, KINDS
from nemo_ext.nemo_rl.support import V070
from tests.fixtures_policies import POLICIES, published, text_model

HOOKS = "SupportsEagle3"
LISTED = [(family, name) for family in FAMILIES for name in family.architectures]


@pytest.fixture(scope="module")
def vllm() -> Path:
    """The engine's package folder."""
    root = os.environ.get("NEMO_EXT_ENGINE_SOURCE")
    if not root or not (Path(root) / "vllm" / "model_executor").is_dir():
        pytest.fail(f"NEMO_EXT_ENGINE_SOURCE is {root}; set the folder that has the pinned engine's unpacked vllm/")
    return Path(root) / "vllm"


@pytest.fixture(scope="module")
def version() -> str:
    """Of the checkout under test."""
    found = upstream_version()
    assert found is not None
    return found


def test_the_engine_is_the_one_that_this_version_pins(vllm, version):
    name, number = ENGINES[version].split()
    assert name == "vLLM" and f"'{number}" in (vllm / "_version.py").read_text()


@pytest.mark.parametrize(("family", "architecture"), LISTED, ids=lambda value: value if isinstance(value, str) else "")
def test_the_engine_hands_hidden_states_out_as_listed(vllm, version, family, architecture):
    where = registry(vllm).get(architecture)
    served = where is not None and has_hooks(vllm, *where) and chosen(vllm, family.architectures[architecture])
    # What is multimodal is refused before the engine is asked.
    assert family.multimodal or served == (version in family.taps)


@pytest.mark.parametrize("name", POLICIES)
def test_the_published_policies_are_listed_with_their_model_types(name):
    architecture = published(name)["architectures"][0]
    (family,) = [family for family, listed in LISTED if listed == architecture]
    assert family.architectures[architecture] == text_model(name)["model_type"]
    assert family.latent == ("kv_lora_rank" in text_model(name))


def test_dflash_beside_latent_attention_is_as_listed(vllm, version):
    """Before the engine kept non-causal attention to the draft's layers, a policy with latent attention had no backend."""
    selector = ast.parse((vllm / "v1/attention/selector.py").read_text())
    asked_of_all = any(isinstance(node, ast.Constant) and node.value == "dflash" for node in ast.walk(selector))
    answers = [
        node
        for file in [*(vllm / "v1/attention/backends/mla").glob("*.py"), _layer(vllm, "mla_attention")]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "supports_non_causal"
    ]
    for family in FAMILIES:
        if family.latent and version in family.taps:
            assert (family.blocked("dflash", version) == "latent") == (asked_of_all and not answers)


def test_the_engine_knows_the_drafts_that_are_served(vllm, version):
    names = {"eagle3": "LlamaForCausalLMEagle3", **{kind: names[0] for kind, names in ARCHITECTURES.items()}}
    for kind in KINDS:
        assert (names[kind] in registry(vllm)) == (version != V070 or kind != "dspark"), kind


@cache
def _module(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _layer(vllm: Path, name: str) -> Path:
    return vllm / "model_executor/layers/attention" / f"{name}.py"


@cache
def registry(vllm: Path) -> dict[str, tuple[Path, str]]:
    """Architecture -> file and class, from the registry's literal dicts."""
    models, found = vllm / "model_executor/models", {}
    for node in ast.walk(_module(models / "registry.py")):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                module, cls = (getattr(part, "value", None) for part in value.elts)
                if isinstance(module, str) and isinstance(cls, str):
                    found.setdefault(key.value, (_file(vllm, models, module), cls))
    assert found, "the registry is not read right"
    return found


def _file(vllm: Path, folder: Path, module: str) -> Path:
    """Of a module as an import in `folder` names it: whole (`vllm.x`) or relative (`x`)."""
    parts = module.split(".")
    base = vllm.joinpath(*parts[1:]) if parts[0] == "vllm" else folder.joinpath(*parts)
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def has_hooks(vllm: Path, file: Path, name: str) -> bool:
    """Whether a class has `SupportsEagle3` among its bases, through classes of the same tree."""
    if name == HOOKS:
        return True
    if not file.is_file():
        return False
    tree = _module(file)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return any(has_hooks(vllm, file, base) for base in bases)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    folder = file.parents[node.level - 1] if node.level else file.parent
                    return has_hooks(vllm, _file(vllm, folder, node.module), alias.name)
    return False


def chosen(vllm: Path, model_type: str) -> bool:
    """Whether the speculative config lets drafts over hidden states run beside a model type; it has a list or none."""
    for node in ast.walk(_module(vllm / "config/speculative.py")):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "aux_hidden_states_supported":
            return any(word in model_type for word in ast.literal_eval(node.value))
    return True
