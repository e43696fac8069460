"""`eaglelab export` and `import` as a user runs them."""

import json

from tests.cli.conftest import run


def test_a_drafter_goes_out_comes_in_decodes_and_trains_on(trained, tmp_path):
    done = run("export", f"run={trained}", "format=eagle", "out=out", "dtype=float32", cwd=tmp_path)
    assert "written: out (format eagle, float32)" in done.stdout
    (tmp_path / "out" / "eaglelab.json").unlink()  # as if someone else had written it
    done = run("import", "source=out", "target.source=bundled", "out=in", cwd=tmp_path)
    assert "embedding: equal to the target's" in done.stdout
    assert "train.py init_from=in variant=eagle" in done.stdout
    run("evaluate", "run=in", "limit=2", "max_new_tokens=16", cwd=tmp_path)
    metrics = json.loads((tmp_path / "in" / "metrics.json").read_text())
    assert metrics["identical"] == {"count": 2, "of": 2}
    assert metrics["imported"]["format"] == "eagle"
    run("train", "debug=fast", "init_from=in", "hydra.run.dir=on", cwd=tmp_path)
    assert (tmp_path / "on" / "checkpoints" / "last.ckpt").is_file()


def test_bad_input_ends_in_one_message(trained, tmp_path):
    for arguments, message in (
        (
            ("export", f"run={trained}", "format=eagle3", "out=out"),
            "cannot hold a drafter of variant eagle; use eagle or",
        ),
        (("import", "source=nothing/here/x", "target.source=bundled", "out=in"), "nothing/here/x does not exist"),
    ):
        done = run(*arguments, cwd=tmp_path, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
