"""The audit of the locks, against a small index on this machine that answers as OSV does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tools import audit
from tools.lock_files import FOLDER
from tools.locks import ROOT

HASH = f" \\\n    --hash=sha256:{'0' * 64}\n"


class Index(ThreadingHTTPServer):
    """Vulnerabilities by package and version; results have one finding a page."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.listed: dict[tuple[str, str], list[str]] = {}
        self.asked: list[dict[str, Any]] = []
        self.fault = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        self.server.asked += queries
        results = []
        for query in queries:
            assert query["package"]["ecosystem"] == "PyPI"
            listed = self.server.listed.get((query["package"]["name"], query["version"]), [])
            page = int(query.get("page_token", 0))
            result: dict[str, Any] = {"vulns": [{"id": listed[page]}]} if listed else {}
            results.append(result | ({"next_page_token": f"{page + 1}"} if page + 1 < len(listed) else {}))
        body = self.server.fault or json.dumps({"results": results}).encode()
        self.send_response(200 if self.path == "/v1/querybatch" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (folder := tmp_path / FOLDER).mkdir()
    (folder / "login.lock").write_text(f"one==1.0{HASH}")
    (folder / "cpu.lock").write_text(f"one==1.0{HASH}torch==2.13.0+cpu{HASH}two==2.0{HASH}two==2.1{HASH}")
    (folder / "judged.toml").write_text("")
    return tmp_path


def judge(project: Path, *entries: dict[str, str]) -> None:
    lines = [
        f"[[finding]]\n{''.join(f'{key} = {json.dumps(value)}{chr(10)}' for key, value in e.items())}" for e in entries
    ]
    (project / FOLDER / "judged.toml").write_text("\n".join(lines))


def test_every_locked_version_is_looked_up_once(
    index: Index, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main([f"--index={index.url}"], project) == 0
    asked = [(query["package"]["name"], query["version"]) for query in index.asked]
    assert sorted(asked) == [("one", "1.0"), ("torch", "2.13.0"), ("two", "2.0"), ("two", "2.1")]
    assert capsys.readouterr().out == "audit: 4 locked versions, 0 findings, 0 of them judged\n"


def test_a_finding_fails_until_it_is_judged(index: Index, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On every page of the index's answer."""
    index.listed = {("torch", "2.13.0"): ["GHSA-1", "GHSA-2"], ("two", "2.1"): ["GHSA-3"]}
    assert audit.main([f"--index={index.url}"], project) == 1
    out = capsys.readouterr().out
    assert re.search(r"^requirements/cpu.lock: torch==2.13.0: https://osv.dev/GHSA-2; upgrade with", out, re.M)
    assert "3 findings, 0 of them judged" in out
    reasons = {"GHSA-1": "torch", "GHSA-2": "torch", "GHSA-3": "two", "GHSA-4": "one"}
    judge(project, *({"id": key, "package": name, "reason": "not used"} for key, name in reasons.items()))
    assert audit.main([f"--index={index.url}"], project) == 0
    out = capsys.readouterr().out
    assert "GHSA-4 of one is not listed for the locked version: remove it" in out
    assert "3 findings, 3 of them judged" in out


@pytest.mark.parametrize(
    "fault", [b"<html>", b"{}", b'{"results": [{}]}', b'{"results": 1}', b'{"results": [1, 2, 3, 4]}']
)
def test_an_index_that_does_not_answer_is_reported(
    index: Index, project: Path, fault: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, which says that nothing was checked; never as a clean result."""
    index.fault = fault
    assert audit.main([f"--index={index.url}"], project) == 0
    assert re.fullmatch(r"audit: no answer from .*: 4 locked versions are NOT checked\n", capsys.readouterr().out)


def test_no_index_at_all_is_reported(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--index=http://127.0.0.1:1"], project) == 0
    assert re.fullmatch(r"audit: no answer from .*: 4 locked versions are NOT checked\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"id": "GHSA-1", "package": "one"}, "a finding without reason; add reason to it"),
        ({"id": "GHSA-1", "package": "one", "reason": " "}, "a finding without reason"),
        ({"id": "GHSA-1", "package": "one", "reasons": "r"}, "unknown key 'reasons'; did you mean 'reason'"),
    ],
)
def test_a_judgement_has_a_reason(
    index: Index, project: Path, entry: dict[str, str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judge(project, entry)
    assert audit.main([f"--index={index.url}"], project) == 2
    assert error in capsys.readouterr().err


def test_the_projects_own_judgements_are_valid() -> None:
    assert all(audit.judged(ROOT).values())
