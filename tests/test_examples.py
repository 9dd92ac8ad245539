"""Every example runs as it stands, offline, learns something, and says how it is used."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {"fine_tune_hf": "transformers", "lora": "peft", "trainer": "accelerate"}
NAMES = ["fine_tune_hf", "lora", "notebook", "pretrain", "trainer"]
pytestmark = [
    pytest.mark.skipif(not EXAMPLES.exists(), reason="tests without the rest of the repository"),
    pytest.mark.usefixtures("one_thread"),
]


def run(name: str, *words: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = EXAMPLES / f"{name}.py"
    argv, sys.argv = sys.argv, [str(script), *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss'?:? '?([0-9.]+)", text)]


@pytest.mark.parametrize("name", NAMES)
def test_it_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(name)
    seen = losses(capsys.readouterr().out)
    assert seen[-1] < 0.95 * seen[0]


@pytest.mark.parametrize("name", NAMES)
def test_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"{name}.py" in said
    assert "--nvme" in said
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80


def test_they_are_all_here() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == NAMES


def test_a_fine_tuned_model_goes_into_a_pipeline(tmp_path: Path) -> None:
    """The export has its tokenizer beside the weights."""
    transformers = pytest.importorskip("transformers")
    from hf_folder import save_folder

    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    save_folder(folder)
    run("fine_tune_hf", "--model", str(folder), "--text", str(folder / "text.txt"), "--out", str(out), "--steps", "2")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (out / "export" / name).is_file()
    ids = [transformers.AutoTokenizer.from_pretrained(path)("a fox")["input_ids"] for path in (folder, out / "export")]
    assert ids[0] == ids[1]
    pipeline = transformers.pipeline("text-generation", model=str(out / "export"))
    (said,) = pipeline("the quick", max_new_tokens=4, do_sample=False)
    assert said["generated_text"].startswith("the quick")


def test_no_launcher_and_no_environment(tmp_path: Path) -> None:
    """The notebook's script under an empty environment."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_path({str(EXAMPLES / 'notebook.py')!r})"
    done = subprocess.run(
        ["env", "-i", sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "20 steps" in done.stdout


def test_pretraining_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two halves print the losses of the whole."""
    run("pretrain", "--nvme", str(tmp_path / "whole"), "--steps", "6")
    whole = capsys.readouterr().out
    run("pretrain", "--nvme", str(tmp_path / "halves"), "--steps", "3")
    run("pretrain", "--nvme", str(tmp_path / "halves"), "--steps", "3", "--resume")
    assert capsys.readouterr().out == whole
