"""What the documentation says of the code is what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page, script", [("support", "support_table"), ("performance", "performance_page")])
def test_generated_pages_are_what_their_scripts_print(page: str, script: str):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"docs/{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / f"docs/{page}.md").read_text() == module.render(), "run `make docs`"


def environment_variables_in_code() -> set[str]:
    """MOK_* names in shipped sources, and others that they read from the environment by a literal name."""
    names: set[str] = set()
    for folder in ("mok_hf", "model_patches", "csrc", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh") and "build" not in path.parts:
                text = path.read_text()
                names |= set(re.findall(r"(?:environ(?:\.get\(|\[)|getenv\()\s*\"(\w+)\"", text))
    return names


def test_environment_variables_are_in_the_readme():
    table = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    read = environment_variables_in_code()
    assert read, "the search for variables finds none"
    assert read <= table, f"read by the code but not in the README's table: {sorted(read - table)}"
    ours = {name for name in table if name.startswith("MOK_")}
    assert ours <= read, f"in the README's table but read nowhere: {sorted(ours - read)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_python_in_the_documentation_names_what_exists():
    """Every `mok_hf.name` and every finetune option that a page mentions is there."""
    import mok_hf

    options = set(re.findall(r"add_argument\(\s*\"(--\w+)\"", (ROOT / "examples/finetune.py").read_text()))
    for page in PAGES:
        text = page.read_text()
        for name in set(re.findall(r"mok_hf\.([a-z_]+)\b(?![./])", text)) - {"model_patches", "training", "kernel"}:
            assert hasattr(mok_hf, name), f"{page.name} mentions mok_hf.{name}"
        for command in re.findall(r"finetune\.py((?:[^\n`]|\\\n)*)", text):
            for option in re.findall(r"--\w+", command):
                assert option in options, f"{page.name} passes {option} to finetune.py"


def test_troubleshooting_quotes_what_the_code_says():
    """Each bold code quote is part of a message in the sources; quotes are matched across the literal's line breaks."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quotes = [" ".join(quote.split()) for quote in re.findall(r"\*\*`([^`]+)`\*\*", page)]
    assert len(quotes) > 20
    sources = [path.read_text() for folder in ("mok_hf", "csrc/torch-ext") for path in (ROOT / folder).rglob("*.py")]
    # Adjacent string literals are one message.
    text = re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(sources))
    missing = [quote for quote in quotes if quote not in text]
    assert not missing, missing


def test_the_readmes_code_runs(checkpoints, tmp_path):
    """Both blocks: in one process, and with the experts shared by two."""
    from safetensors.torch import load_file

    from tests.distributed import run_ranks

    one, many = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    checkpoint = checkpoints("deepseek_v3")
    (report,) = run_ranks(1, "tests.training.workers:run_documentation", [one], checkpoint, tmp_path / "none")
    assert "2 of 2 MoE blocks on the MoK kernel, EP 1" in report
    run_ranks(2, "tests.training.workers:run_documentation", [one.partition("model =")[0], many], checkpoint, tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path))
    assert before.keys() == after.keys()
    changed = [name for name in before if not before[name].equal(after[name])]
    assert any(".mlp.experts." in name for name in changed), "two steps have trained the experts"
