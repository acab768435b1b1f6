"""What the pages say of the settings is what the schema has."""

from pathlib import Path

from nemo_ext.config import READ_BY, DraftConfig, DraftOptimizer, show

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_has_every_key_with_its_default_and_its_drafts():
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in PAGE.read_text().splitlines()]
    told = {key.strip("`"): (default, kinds) for key, default, kinds in (row for row in cells if len(row) == 3)}
    fields = {key: field for key, field in DraftConfig.model_fields.items() if key != "optimizer"}
    fields |= {f"optimizer.{key}": field for key, field in DraftOptimizer.model_fields.items()}
    wanted = {key: (show(field.default), ", ".join(READ_BY.get(key, ("all",)))) for key, field in fields.items()}
    assert {key: told.get(key) for key in wanted} == wanted
    assert set(told) - set(wanted) == {"key", "---"}
