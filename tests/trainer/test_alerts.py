"""Alerts of a real run: recorded, shown, sent, saved for, and stopped by."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.observe.alerts.record import read_alerts
from tests.helpers.runs import complete, records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

RULES = [
    {"metric": "loss", "above": 0, "action": "save"},
    {"metric": "grad_norm", "above": 0, "steps": 2, "action": "stop"},
    {"metric": "learning_rate", "above": 1, "action": "stop"},
]


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, json.loads(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_run_warns_saves_stops_and_resumes(tmp_path: Path) -> None:
    """On two ranks: what one of them decides, both do."""
    server = HTTPServer(("127.0.0.1", 0), _Receiver)
    server.received = []  # type: ignore[attr-defined]
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/services/hidden0987"
    command = f"env | grep RLHPC_ALERT_RULE >> {tmp_path}/rules; cat >> {tmp_path}/json; echo >> {tmp_path}/json"
    alerts = {"rules": RULES, "command": command, "webhook": url}
    config = write_config(
        tmp_path, sft__steps=4, train__steps=0, data__validation=[], resources__ranks_per_node=2, observe__alerts=alerts
    )
    code, output = run(config)
    assert code == 1, output
    folder = RunFolder(tmp_path / "run")
    assert [record["step"] for record in records(folder.path)] == [1, 2]
    assert sorted(path.name for path in folder.checkpoints.iterdir() if path.name[0] == "s") == [
        "step-00000001",
        "step-00000002",
    ]
    found = read_alerts(folder)
    assert [(alert.rule, alert.step, alert.action) for alert in found] == [
        ("loss above 0", 1, "save"),
        ("grad_norm above 0", 2, "stop"),
        ("verdict", 2, "warn"),
    ]
    assert f"rlhpc: warning: {found[0].message}" in output
    assert f"rlhpc: saved and ended by alert grad_norm above 0: {found[1].message}; resume with --resume" in output
    sent = [body for path, body in server.received if path == "/services/hidden0987"]  # type: ignore[attr-defined]
    assert [body["rule"] for body in sent] == ["loss above 0", "grad_norm above 0", "verdict"]
    assert sent[0]["text"] == f"run: warning: {found[0].message}"
    assert [json.loads(line)["rule"] for line in (tmp_path / "json").read_text().splitlines()] == [
        body["rule"] for body in sent
    ]
    assert "RLHPC_ALERT_RULE=verdict" in (tmp_path / "rules").read_text()
    hidden = [path for path in folder.path.rglob("*") if path.is_file() and b"hidden0987" in path.read_bytes()]
    assert hidden == [folder.secrets]
    assert "hidden0987" not in output

    complete(config, "--resume")
    assert [record["step"] for record in records(folder.path)] == [1, 2, 3, 4]
    assert [alert.rule for alert in read_alerts(folder)[3:]] == ["verdict"]
    assert server.received[-1][1]["message"] == "the run has finished"  # type: ignore[attr-defined]
    server.shutdown()
