"""The command's side of the API: streams, errors in words, conversations; chat and status as people use them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.api import Api, ApiError, Delta
from cli.chat import Conversation
from cli.console import bytes_text
from cli.main import main
from cli.status import cell
from shared.embedded import free_port
from tests.cli.fake_conductor import CLUSTER, FakeConductor, chunk, fake_conductor, usage

ROLES = ("prefill", "decode")
MOONCAKE = Path(sys.executable).with_name("mooncake")


@pytest.fixture
def conductor() -> Iterator[FakeConductor]:
    with fake_conductor() as server:
        yield server


def run(conductor: FakeConductor, command: str, *argv: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [command, "--url", conductor.url, *argv], input=stdin)


def asked(conductor: FakeConductor) -> list[Any]:
    return [body for path, _, body in conductor.requests if path == "/v1/chat/completions"]


# -- the API -----------------------------------------------------------------------------------------------


def test_a_stream_is_its_deltas_and_its_usage(conductor: FakeConductor) -> None:
    deltas = list(Api(conductor.url, key="k").chat({"model": "tiny"}))
    assert deltas[:3] == [Delta("Par"), Delta("is"), Delta("", "stop")]
    assert deltas[3].usage is not None and deltas[3].usage.completion == 2
    _, headers, body = conductor.requests[0]
    assert headers["Authorization"] == "Bearer k"
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


def test_an_error_event_inside_a_stream_is_an_error(conductor: FakeConductor) -> None:
    conductor.events = [chunk("Par"), {"error": {"message": "attempts are used up"}}]
    with pytest.raises(ApiError, match="attempts are used up"):
        list(Api(conductor.url).chat({}))


def test_a_stream_that_just_ends_is_an_error(conductor: FakeConductor) -> None:
    conductor.events = [chunk("Par")]
    with pytest.raises(ApiError, match="ended before"):
        list(Api(conductor.url).chat({}))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((429, {"Retry-After": "7"}, {"error": {"message": "busy"}}), "429: busy (retry after 7 s)"),
        ((401, {}, {"error": {"message": "which key?"}}), "401: which key?"),
        ((502, {}, "<html>"), "502: Bad Gateway"),
        ((500, {}, {"error": "odd"}), "500: Internal Server Error"),
    ],
)
def test_refusals_are_told_in_the_servers_words(conductor: FakeConductor, answer: Any, words: str) -> None:
    conductor.answers["/v1/chat/completions"] = answer
    result = run(conductor, "chat", "-m", "hello")
    assert result.exit_code == 1 and words in result.output


def test_nobody_there_is_told_in_one_sentence() -> None:
    for command in (["chat", "-m", "x"], ["status"], ["trace", "x"]):
        result = CliRunner().invoke(main, [*command, "--url", f"http://127.0.0.1:{free_port()}"])
        assert result.exit_code == 1 and "is not reachable: Connection refused" in result.output
        assert "`mooncake up` starts a mesh" in result.output


@pytest.mark.parametrize(
    "url", ["foo", "", "ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://127.0.0.1:x", "http://[::1"]
)
@pytest.mark.parametrize("command", [["chat", "-m", "x"], ["status"], ["trace", "x"]])
def test_what_is_no_address_is_told_in_one_sentence(command: list[str], url: str) -> None:
    result = CliRunner().invoke(main, [*command, f"--url={url}"])
    assert result.exit_code == 1 and result.output.startswith("Error: "), result.exception


def test_the_url_that_clients_of_openai_take_works_too(conductor: FakeConductor) -> None:
    assert CliRunner().invoke(main, ["status", "--url", f"{conductor.url}/v1/"]).exit_code == 0


def test_a_missing_key_is_told_with_what_to_do(conductor: FakeConductor) -> None:
    conductor.answers["/cluster"] = (401, {}, {"error": {"message": "which key?"}})
    assert "401: which key? (--api-key or MOONCAKE_API_KEY gives one)" in run(conductor, "status").output


# -- chat --------------------------------------------------------------------------------------------------


def test_one_message_is_answered_on_stdout_and_measured_on_stderr(conductor: FakeConductor) -> None:
    result = run(conductor, "chat", "-m", "Capital of France?", "--system", "Be brief.", "--max-tokens", "9")
    assert result.exit_code == 0 and result.stdout == "Paris\n"
    assert "prompt 20 of which 16 cached" in result.stderr and "first token" in result.stderr
    assert asked(conductor)[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert asked(conductor)[0]["max_tokens"] == 9 and asked(conductor)[0]["model"] == "tiny"


def test_several_messages_are_turns_of_one_conversation(conductor: FakeConductor) -> None:
    assert run(conductor, "chat", "-m", "one", "-m", "two").exit_code == 0
    roles = [message["role"] for message in asked(conductor)[1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_in_a_pipe_stdin_is_the_message(conductor: FakeConductor) -> None:
    result = run(conductor, "chat", stdin="Capital of\nFrance?\n")
    assert result.stdout == "Paris\n"
    assert asked(conductor)[0]["messages"] == [{"role": "user", "content": "Capital of\nFrance?"}]


def test_json_is_one_document_a_turn_and_nothing_else(conductor: FakeConductor) -> None:
    conductor.events[3] = usage(100, 64, 2)
    result = run(conductor, "chat", "--json", "-m", "one", "-m", "two")
    turns = [json.loads(line) for line in result.stdout.splitlines()]
    assert [turn["text"] for turn in turns] == ["Paris", "Paris"] and turns[0]["finish"] == "stop"
    assert (turns[0]["prompt_tokens"], turns[0]["cached_tokens"], turns[0]["completion_tokens"]) == (100, 64, 2)
    assert 0 < turns[0]["ttft_s"] <= turns[0]["total_s"]


def test_no_model_served_is_said_so(conductor: FakeConductor) -> None:
    conductor.answers["/v1/models"] = (200, {}, {"data": []})
    assert "no model is served yet" in run(conductor, "chat", "-m", "x").output


def test_a_failed_turn_leaves_the_conversation_as_it_was(conductor: FakeConductor) -> None:
    conversation = Conversation(Api(conductor.url), "tiny", "sys", {})
    conversation.say("one", lambda _text: None)
    before = list(conversation.messages)
    conductor.events = [chunk("half")]
    with pytest.raises(ApiError):
        conversation.say("two", lambda _text: None)
    assert conversation.messages == before
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "sys"}]


def test_on_a_terminal_it_is_a_conversation(conductor: FakeConductor) -> None:
    lead, follow = pty.openpty()
    argv = [str(MOONCAKE), "chat", "--url", conductor.url]
    with subprocess.Popen(argv, stdin=follow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.close(follow)
        os.write(lead, b"one\n\n/reset\n/what\ntwo\n/quit\n")
        stdout, stderr = process.communicate(timeout=200)
    os.close(lead)
    assert process.returncode == 0, stderr
    assert stdout.count("Paris") == 2 and "/reset" in stderr
    assert len(asked(conductor)) == 2 and len(asked(conductor)[1]["messages"]) == 1, "reset forgot the first turn"


# -- status ------------------------------------------------------------------------------------------------


def test_status_shows_every_instance_and_agent(conductor: FakeConductor) -> None:
    result = run(conductor, "status", "--once")
    assert result.exit_code == 0
    for word in ("prefill-0", "decode-0", "suspected", "700", "60/64", "25 (25 %)", "100.0 MiB", "leases 2"):
        assert word in result.stdout, word
    for word in ("tiny at http://", "conductor: ready, policy paper", "43 blocks, 0.2 s behind"):
        assert word in result.stdout, word
    for word in ("SSD tiers", "311", "3.0 GiB/8.0 GiB", "93", "1.9 GiB"):
        assert word in result.stdout, word
    assert "2 running, 9 accepted, 3 rejected" in result.stdout and "prefill 1.50" in result.stdout
    assert " 42 " in row(result.stdout, "node-p0"), "blocks that the index has of the agent"
    assert "/64" not in row(result.stdout, "prefill-0"), "a prefill instance promises no blocks"


def test_ids_that_nobody_chose_are_told_by_role_and_node(conductor: FakeConductor) -> None:
    """Processes that are started by hand have a UUID each."""
    named = [{"id": f"{number}" * 32, "role": role, "node": f"host-{role}"} for number, role in enumerate(ROLES)]
    agents = [{"id": f"{number}" * 32, "node": f"host-{number}"} for number in (7, 8)]
    conductor.answers["/cluster"] = (200, {}, {**CLUSTER, "instances": named, "agents": agents})
    text = run(conductor, "status").stdout
    for number, role in enumerate(ROLES):
        assert f" {role} " in row(text, f"{number}" * 32) and f"host-{role}" in row(text, f"{number}" * 32)
    assert all(f"host-{number}" in row(text, f"{number}" * 32) for number in (7, 8))


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(name))


def test_what_is_piped_is_never_cut_off(conductor: FakeConductor) -> None:
    """Whatever the names and however long the lines: scripts and mails have no width."""
    name = "an-instance-with-a-name-" + "x" * 150
    cluster = {**CLUSTER, "instances": [{"id": name, "node": name, "role": "decode"}]}
    conductor.answers["/cluster"] = (200, {}, cluster)
    done = subprocess.run([MOONCAKE, "status", "--url", conductor.url], capture_output=True, text=True, timeout=200)
    assert done.stdout.count(name) == 2 and "…" not in done.stdout


def test_why_a_mesh_is_not_ready_is_said(conductor: FakeConductor) -> None:
    conductor.answers["/cluster"] = (200, {}, {**CLUSTER, "ready": False, "reasons": ["no_decode"], "degraded": ["x"]})
    assert "conductor: not ready: no_decode, degraded: x, policy paper" in run(conductor, "status").stdout


def test_status_as_json_is_what_the_conductor_says(conductor: FakeConductor) -> None:
    result = run(conductor, "status", "--json", "--api-key", "k")
    assert json.loads(result.stdout)["policy"] == "paper"
    assert conductor.requests[0][1]["Authorization"] == "Bearer k"


def test_values_of_every_shape_fit_a_cell() -> None:
    assert cell(None) == cell("") == cell({}) == cell([]) == cell({"a": 0}) == "-"
    assert cell({"a": 1, "b": [1, 2]}) == "a 1 b 1,2"
    assert cell(True) == "yes" and cell(0.123456) == "0.1235" and cell(0) == "0"
    assert bytes_text(0) == "0 B" and bytes_text(1536) == "1.5 KiB" and bytes_text(5 << 40) == "5.0 TiB"
