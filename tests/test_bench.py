"""The benchmark's book-keeping: peers take turns, those that fail are named and cost no other its row."""

import sys

import pandas as pd
import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import report

import bench as controller

FAKE = """
import sys, time
sys.path.insert(0, {bench!r})
from protocol import serve
print("noise on stdout, before")
def measure(q):
    print("and noise while measuring")
    {body}
serve({name!r}, "made up", measure)
"""


def fake(tmp_path, name, body):
    path = tmp_path / f"{name}.py"
    path.write_text(FAKE.format(bench=str(ROOT / "bench"), name=name, body=body))
    return controller.Peer([sys.executable, path])


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "read_bandwidth", lambda device: 1e9)
    made = []

    def make(**peers):
        processes = {name: fake(tmp_path, name, body) for name, body in peers.items()}
        made.extend(processes.values())
        return controller.Bench(torch.device("cpu"), tmp_path / "bench.csv"), processes

    yield make
    for peer in made:
        peer.stop()


CASE = {"dialect": "llama", "dtype": "float32", "n_kv": 2, "batch": 4, "context": 100, "steps": 3}
STEADY = "return {'steps_s': [0.2] * q['steps'], 'floor': [1e8] * q['steps'], 'kv_bytes': 7}"


def test_ratios_shares_and_rates_are_what_they_say(bench, tmp_path):
    run, peers = bench(ours=STEADY, other="return {'steps_s': [0.6] * q['steps']}")
    run.measure("decode", peers, CASE, rounds=2, limit_s=60)
    table = pd.read_csv(tmp_path / "bench.csv").set_index("peer")
    assert table.step_ms["ours"] == pytest.approx(200) and table.tokens_per_s["ours"] == pytest.approx(4 / 0.2)
    assert table.bandwidth_share["ours"] == pytest.approx(1e8 / 1e9 / 0.2)  # floor of 0.1 s, step of 0.2 s
    assert table.ours_is_faster["other"] == pytest.approx(3) and pd.isna(table.bandwidth_share["other"])
    assert (table.commit != "").all() and table.threads["ours"] == torch.get_num_threads()


def test_a_long_generation_is_judged_by_its_mean_and_not_by_its_median(bench, tmp_path):
    run, peers = bench(ours="return {'steps_s': [0.1, 0.1, 0.4]}")
    run.measure("whole", peers, CASE, rounds=1, limit_s=60)
    (row,) = pd.read_csv(tmp_path / "bench.csv").to_dict("records")
    assert row["tokens_per_s"] == pytest.approx(4 / 0.2) and row["step_ms"] == pytest.approx(100)


@pytest.mark.parametrize(
    "body, reason",
    [
        ("raise RuntimeError('no such\\nkernel')", "RuntimeError: no such"),
        ("return {'skip': 'not on this machine'}", "not on this machine"),
        ("sys.exit(3)", "ended without an answer"),
        ("time.sleep(30)", "no answer in 3 s"),
    ],
)
def test_a_peer_that_fails_is_named_and_the_others_keep_their_rows(bench, tmp_path, body, reason):
    run, peers = bench(ours=STEADY, broken=body)
    peers["missing"] = controller.Peer([str(tmp_path / "no-python"), "x.py"])
    run.measure("decode", peers, CASE, rounds=2, limit_s=3)
    run.measure("decode", peers, {**CASE, "batch": 8}, rounds=1, limit_s=3)
    table = pd.read_csv(tmp_path / "bench.csv")
    assert len(table) == 6 and table[table.peer == "ours"].tokens_per_s.notna().all()
    broken = table[table.peer == "broken"]
    assert broken.tokens_per_s.isna().all() and reason in broken.skip.iloc[0]
    if "no answer" in reason:  # what is larger is not even asked
        assert "a smaller case took over 3 s" in broken.skip.iloc[1]
    assert table[table.peer == "missing"].skip.str.contains("not installed").all()


def test_measuring_again_replaces_the_rows_of_that_case_only(bench, tmp_path):
    run, peers = bench(ours=STEADY)
    run.measure("decode", peers, CASE, rounds=1, limit_s=60)
    run.measure("decode", peers, {**CASE, "n_kv": 8}, rounds=1, limit_s=60)
    again = controller.Bench(torch.device("cpu"), tmp_path / "bench.csv")
    again.measure("decode", peers, CASE, rounds=1, limit_s=60)
    table = pd.read_csv(tmp_path / "bench.csv")
    assert sorted(table.n_kv) == [2, 8]


def test_our_own_workers_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "read_bandwidth", lambda device: 1e9)
    run = controller.Bench(torch.device("cpu"), tmp_path / "bench.csv")
    small = {**CASE, "context": 40}
    decoders = {name: controller.Peer(controller.PEERS[name]) for name in ("ours", "pytorch")}
    trainers = {name: controller.Peer(controller.TRAINERS[name]) for name in ("ours", "plain")}
    try:
        run.measure("decode", decoders, {**small, "dtype": "bfloat16"}, rounds=1, limit_s=300)
        run.measure("train", trainers, {**small, "dialect": "gpt2", "floor": True}, rounds=1, limit_s=300)
    finally:
        for peer in (*decoders.values(), *trainers.values()):
            peer.stop()
    table = pd.read_csv(tmp_path / "bench.csv")
    assert table.step_ms.notna().all() and table.get("skip", pd.Series(dtype=str)).isna().all()
    ours = table[(table.kind == "decode") & (table.peer == "nanoGQA")].iloc[0]
    assert ours.kv_bytes == 2 * 6 * 2 * 32 * 40 * 4 * 2  # K and V x layers x n_kv x hd x tokens x batch x bytes
    assert (table[table.kind == "train"].floor_ms > 0).all()


@pytest.mark.parametrize(
    "wrong, named",
    [
        ("peers=[nobody]", "nobody"), ("n_kv=[3]", "3"), ("dtypes=[float8]", "float8"), ("contexts=[5]", "steps + 2"),
        ("device=tpu", "tpu"),
    ],
)  # fmt: skip
def test_a_wrong_case_is_refused_before_anything_is_measured(cwd, wrong, named, monkeypatch, capsys):
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["bench.py", wrong, f"out={cwd}/b.csv"])
    with pytest.raises(SystemExit) as stop:
        controller.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and named in err and err.count("\n") == 1
    assert not (cwd / "b.csv").exists()


def test_tables_and_figures_are_drawn_from_the_file_alone(tmp_path, monkeypatch, capsys):
    about = {"how": "h", "threads": 2, "commit": "c0ffee", "machine": "a machine", "cpu": "AVX2"}
    rows = []
    for n_kv in (8, 2, 1):
        for batch in (1, 8):
            for context in (64, 256, 2000):
                row = {"dialect": "llama", "dtype": "float32", "n_kv": n_kv, "batch": batch, "context": context, "steps": 4}
                speed = {"step_ms": 0.1 * n_kv * context, "tokens_per_s": 1e4 * batch / (n_kv * context)}
                read = {"read_mb": n_kv * context / 10, "bandwidth_gb_s": 20.0, "bandwidth_share": 0.5}
                rows += [row | speed | read | about | {"kind": kind, "peer": "nanoGQA"} for kind in ("decode", "growth")]
                rows.append(row | about | {"kind": "decode", "peer": "other", "tokens_per_s": 10.0, "ours_is_faster": 3.0})
    for batch, context in [(b, 256) for b in (1, 2, 4)] + [(2, t) for t in (64, 128, 512)]:
        row = {"kind": "train growth", "peer": "nanoGQA", "batch": batch, "context": context, "n_kv": 8, "dialect": "gpt2"}
        rows.append(row | about | {"step_ms": 3.0 * batch * context, "tokens_per_s": 1.0})
    results = tmp_path / "results"
    results.mkdir()
    pd.DataFrame(rows).to_csv(results / "bench.csv", index=False)
    (tmp_path / "README.md").write_text("before\n<!-- bench-peers -->\nold\n<!-- /bench-peers -->\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "FIGURES", results / "figures")
    monkeypatch.setattr(sys, "argv", ["report.py"])
    report.main()
    assert {path.stem for path in (results / "figures").iterdir()} == {"roofline", "peers", "growth"}
    text = (tmp_path / "README.md").read_text()
    assert "| other | 10 (3.0x) |" in text and "old" not in text and text.startswith("before") and text.endswith("after\n")
    out = capsys.readouterr().out
    assert "1.00" in out  # the made-up step grows in proportion: slope 1
