"""Every problem of a configuration is one sentence that names the key (F4, F10, F17)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.cli.config import KEYS, PRESETS, Config, load
from tierzero.errors import ConfigError
from tierzero.sizes import parse_size


def problem(*settings: str, toml: str = "", tmp: Path | None = None) -> str:
    path = None
    if toml:
        assert tmp is not None
        path = tmp / "run.toml"
        path.write_text(toml)
    with pytest.raises(ConfigError) as raised:
        load(path, settings)
    return str(raised.value)


def test_defaults_are_the_demo() -> None:
    config = load(None)
    assert config.shape == PRESETS["demo"]
    assert (config.train.out, config.store) == (Path("runs/demo"), Path("runs/demo/store"))
    assert config.train.dtype == "bfloat16"
    assert config.train.recompute


def test_file_and_settings_over_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[train]\nsteps = 7\nlr = 1e-4\n[tiers]\nhost = "64MiB"\n')
    config = load(
        tmp_path / "run.toml", ["train.steps=9", "tiers.device=5e7", "train.out=some/where", 'train.dtype="float32"']
    )
    assert (config.train.steps, config.lr, config.train.dtype) == (9, 1e-4, "float32")
    assert parse_size(config.tiers.host or 0) == 64 << 20
    assert parse_size(config.tiers.device or 0) == 50_000_000
    assert config.train.out == Path("some/where")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["train.lr=-1"], "train.lr must be > 0, got -1"),
        (["train.lr=nan"], "train.lr must be a finite number, got nan"),
        (["train.lr=fast"], "train.lr must be a number, got 'fast'"),
        (["train.steps=0"], "train.steps must be > 0, got 0"),
        (["train.steps=2.5"], "train.steps must be a whole number, got 2.5"),
        (["train.steps=true"], "train.steps must be a whole number, got True"),
        (["train.seed=-3"], "train.seed must be >= 0, got -3"),
        (["train.recompute=1"], "train.recompute must be true or false, got 1"),
        (["train.dtype=float16"], "train.dtype must be one of 'bfloat16', 'float32', got 'float16'"),
        (["train.clip=-0.5"], "train.clip must be >= 0, got -0.5"),
        (["train.warmup=100", "train.steps=10"], "train.warmup is 100, more than train.steps = 10: lower one of them"),
        (["train.out="], "train.out must not be empty"),
        (["train.micro_batches=0"], "train.micro_batches must be > 0, got 0"),
        (["train.micro_batches=8"], "train.micro_batches is 8, more than the data.batch = 4 rows of a batch"),
        (["train.micro_batches=2", "train.recompute=false"], "train.recompute = false has no effect with train.micro"),
        (["tiers.gds=maybe"], "tiers.gds must be one of 'auto', 'on', 'off', got 'maybe'"),
        (["tiers.activations=-1"], "tiers.activations must be a size of zero bytes or more, got -1"),
        (["tiers.activations=all"], "tiers.activations 'all' is not a size"),
        (["tiers.prefetch=-1"], 'tiers.prefetch must be "auto" or a whole number >= 0, got -1'),
        (["tiers.prefetch=deep"], "tiers.prefetch must be \"auto\" or a whole number >= 0, got 'deep'"),
        (["model.hidden=100", "model.heads=3"], "model.hidden = 100 must be a multiple of 2 * model.heads = 6"),
        (["model.preset=deno"], "model.preset 'deno' is unknown; did you mean demo?"),
        (["model.preset=zzz"], "model.preset 'zzz' is unknown: there are tiny, demo, 400m, 1b, 7b"),
        (["model.vocab=300"], "model.vocab has no effect on byte-level text"),
        (["model.path=/no/such/model"], "model.path /no/such/model is not a directory"),
        (["data.path=/no/such/text"], "data.path /no/such/text does not exist"),
        (["data.path=/no/such/text.npy", "model.vocab=9"], "data.path /no/such/text.npy does not exist"),
        (["train.stepz=3"], "--set train.stepz=3: unknown key train.stepz; did you mean train.steps?"),
        (["train.step=3"], "did you mean train.steps?"),
        (["train.layers=3"], "did you mean model.layers?"),
        (["lr=3"], "did you mean train.lr?"),
        (["steps"], "--set steps: write section.key=value, such as train.steps=100"),
        (["tiers.nvm=/x"], "did you mean tiers.nvme?"),
    ],
)
def test_bad_settings(settings: list[str], sentence: str) -> None:
    """F10: no key is dropped silently."""
    assert sentence in problem(*settings)


@pytest.mark.parametrize("text", ["12 parsecs", "-5", "", "64MiBs", "1e", "120%", "nan"])
@pytest.mark.parametrize("key", ["host", "device"])
def test_bad_sizes_name_the_key(key: str, text: str) -> None:
    assert problem(f"tiers.{key}={text}").startswith(f"tiers.{key} ")


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[trian]\nsteps = 3\n", "unknown section trian; did you mean train?"),
        ("[qwertz]\nlr = 3\n", "unknown section qwertz; the sections are model, data, train, tiers, checkpoint"),
        ("steps = 3\n", "unknown key steps; did you mean train.steps?"),
        ("train = 3\n", "train must be a table of keys ([train] on a line of its own), got 3"),
        ("[train]\nLR = 3\n", "unknown key train.LR; did you mean train.lr?"),
        ("[train\n", "is not valid TOML"),
        ('[tiers]\ndevice = "a lot"\n', "tiers.device"),
        ("[tiers]\nqwertz = 1\n", "unknown key tiers.qwertz"),
        ("[tiers.nvme]\npath = 1\n", "tiers.nvme must be a path"),
    ],
)
def test_bad_files(toml: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in problem(toml=toml, tmp=tmp_path)


def test_every_problem_is_told(tmp_path: Path) -> None:
    assert len(problem(toml="[train]\nlr = -1\nsteps = 0\n", tmp=tmp_path).splitlines()) == 2


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "binary.toml")


@pytest.mark.parametrize("key", ["preset=demo", "layers=2", "hidden=64", "heads=2", "vocab=9"])
def test_keys_without_effect_beside_a_model_path(key: str, tmp_path: Path) -> None:
    """F17: two ways to say the model exclude each other."""
    said = problem(f"model.path={tmp_path}", f"model.{key}")
    assert f"model.{key.partition('=')[0]} has no effect together with model.path" in said


def test_token_ids_need_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "ids.npy").write_bytes(b"")
    assert "model.vocab is needed" in problem(f"data.path={tmp_path / 'ids.npy'}")


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file: name a directory" in problem(f"train.out={tmp_path / 'file'}")


def test_presets_and_single_values() -> None:
    assert load(None, ["model.preset=tiny", "model.layers=3"]).shape == PRESETS["tiny"] | {"layers": 3}
    for preset in PRESETS:
        load(None, [f"model.preset={preset}"])


def outcome(setting: str) -> str | None:
    """What is wrong with a setting, or None; any other exception than ConfigError fails the test."""
    try:
        assert isinstance(load(None, [setting]), Config)
    except ConfigError as error:
        return str(error)
    return None


@given(st.text(max_size=30))
def test_any_setting_loads_or_raises_a_sentence(text: str) -> None:
    said = outcome(text)
    assert said is None or len(said) > 10


@given(st.sampled_from(KEYS), st.text(alphabet="0123456789.eE+-%MiBa\"'[]{}=", max_size=12))
def test_any_value_loads_or_names_its_key(key: str, value: str) -> None:
    said = outcome(f"{key}={value}")
    assert said is None or key.partition(".")[2] in said


@pytest.mark.parametrize(
    "setting",
    [
        "tiers.nvme_tbw=[]",
        "tiers.nvme_tbw={a = 1}",
        "tiers.host=[1]",
        "tiers.device={}",
        "tiers.activations=[]",
        "tiers.prefetch=[]",
        "tiers.prefetch=inf",
        'tiers.nvme=[ "a"',
        "tiers.nvme=[a, b]",
        "tiers.nvme=[[[[" + "[" * 100_000,
        'tiers.nvme=["a\\u0000b"]',
        "tiers.nvme=a\0b",
        'tiers.nvme=[["a"], ["b"]]',
        "train.out=a\0b",
        "data.path=a\0b",
        "model.path=~nosuchuser/x",
    ],
    ids=lambda setting: repr(setting)[:24].replace("\0", "0"),
)
def test_values_of_odd_kinds_are_a_sentence(setting: str) -> None:
    said = problem(setting)
    assert setting.partition("=")[0] in said
    assert len(said) < 2000


@pytest.mark.parametrize("key", ["train.out", "tiers.nvme", "checkpoint.path", "data.path", "model.path"])
def test_paths_that_lead_nowhere_are_a_sentence(key: str, tmp_path: Path) -> None:
    """Links that lead around in a circle, at the end or on the way, and names longer than there can be."""
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    for path in ("one", "two/below/it"):
        said = problem(f"{key}={tmp_path / path}", "checkpoint.every=1")
        assert said == f"{key} '{tmp_path / path}' leads around in symbolic links: name another path"
    said = problem(f"{key}={tmp_path}/{'n' * 300}", "checkpoint.every=1")
    assert said.startswith(key)
    assert said.endswith("is too long for a path")
