"""Prints `VERSION COMMIT` of each pinned upstream version, or of the one that is named as upstream names it."""

import sys
import tomllib
from pathlib import Path

manifests = [tomllib.loads(path.read_text()) for path in sorted(Path("patches").glob("*/manifest.toml"), reverse=True)]
wanted = sys.argv[1]
found = [one for one in manifests if wanted in ("", one["upstream"])]
if not found:
    names = " or ".join(one["upstream"] for one in manifests)
    sys.exit(f"error: --version is {wanted}; set {names}, or leave it out for all")
for one in found:
    print(one["version"], one["commit"])
