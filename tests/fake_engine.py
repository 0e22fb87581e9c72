#!/usr/bin/env python
"""Stands in for `vllm serve` in tests: the same command line, /health, streamed answers, and the counters of
speculation at /metrics.

It drafts as many tokens as --speculative-config says (3 where it says nothing about a drafter's folder, none for a
verifier) and keeps 0, 1, … K of them in turn,
the same for every request, so that every count can be said beforehand (`expected`). With
--per-request-spec-decode-metrics it adds them to each answer, as vLLM 0.32 does; /last is the last request.
FAKE_ENGINE in its environment makes it misbehave, comma separated:
"fail" ends at the start with an exception, "late" answers /health after a second, "mute" never, "foreign" counts a
request that nobody here asked,
"base" has no chat template, "silent" adds no counts to an answer, "odd" adds some of another form,
"restart" sets the counters back after the second answer, "broken" breaks off in the middle of an answer, "die" ends
after the third answer.
"""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BEHAVIOUR = set(os.environ.get("FAKE_ENGINE", "").split(","))


def installed(folder):
    "The path of this stand-in as a program in a folder."
    program = folder / "vllm"
    folder.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n')
    program.chmod(0o755)
    return program


def expected(k, tokens):
    "(steps, accepted at each position, sizes of the pieces) of an answer of so many tokens"
    accepted, pieces, left, step = [0] * k, [1], tokens - 1, 0
    while left > 0:
        kept = step % (k + 1)
        for i in range(kept):
            accepted[i] += 1
        pieces.append(min(kept + 1, left))
        left, step = left - pieces[-1], step + 1
    return step, accepted, pieces


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def say(self, text, kind="text/plain", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        s = self.server
        if self.path == "/health":
            return self.say("", status=503 if "mute" in BEHAVIOUR or time.time() < s.ready else 200)
        if self.path == "/v1/models":
            return self.say(json.dumps({"data": [{"id": s.model}]}), "application/json")
        if self.path == "/last":
            return self.say(json.dumps(s.last), "application/json")
        if self.path != "/metrics":
            return self.say("", status=404)
        who = 'engine="0",model_name="m"'
        with s.lock:
            lines = [f"vllm:{name}_total{{{who}}} {float(value)}" for name, value in s.counters.items()]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{who},position="{i}"}} {float(n)}'
                for i, n in enumerate(s.accepted)
            ]
        self.say("\n".join(["# HELP vllm:spec_decode_num_drafts_total Drafts.", *lines]) + "\n")

    def do_POST(self):
        s, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        s.last = body
        if "base" in BEHAVIOUR and "messages" in body:
            return self.say(json.dumps({"error": {"message": "no chat template"}}), "application/json", 400)
        if body["max_tokens"] > 500 or "beyond the context" in str(body.get("messages", body.get("prompt"))):
            return self.say(json.dumps({"error": {"message": "too long"}}), "application/json", 400)
        steps, accepted, pieces = expected(s.k, body["max_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chat, done = "messages" in body, 0

        def event(choice, **more):
            self.wfile.write(f"data: {json.dumps({'choices': choice, **more})}\n\n".encode())
            self.wfile.flush()

        if chat:
            event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for n in pieces:
            if "broken" in BEHAVIOUR and done > 3:
                return event([], error={"message": "the engine is dead"})
            ids, done = list(range(done, done + n)), done + n
            words = " ".join(map(str, ids))
            event(
                [
                    {
                        "index": 0,
                        "finish_reason": "length" if done == body["max_tokens"] else None,
                        "token_ids": ids,
                        **(dict(delta=dict(content=words)) if chat else dict(text=words)),
                    }
                ]
            )
            time.sleep(s.pause)
        event([], usage={"completion_tokens": done}, **s.request_metrics(steps, accepted))
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()
        time.sleep(0.02)  # the engine counts after it has answered
        with s.lock:
            again = 2 if "foreign" in BEHAVIOUR and s.counters["request_success"] else 1
            if s.k:
                for name, n in (("drafts", steps), ("draft_tokens", steps * s.k), ("accepted_tokens", sum(accepted))):
                    s.counters[f"spec_decode_num_{name}"] += n * again
                s.accepted = [a + b * again for a, b in zip(s.accepted, accepted)]
            s.counters["request_success"] += again
            s.counters["generation_tokens"] += done * again
            s.answered += 1
            if "restart" in BEHAVIOUR and s.answered == 2:
                s.counters = dict.fromkeys(s.counters, 0)
            if "die" in BEHAVIOUR and s.answered == 3:
                os._exit(7)


def request_metrics(k, steps, accepted):
    "What vLLM 0.32 sends beside the usage: a histogram of steps by accepted tokens, and each step."
    if "silent" in BEHAVIOUR:
        return {}
    kept = [step % (k + 1) for step in range(steps)]
    found = dict(
        acceptance_histogram=[kept.count(n) for n in range(k + 1)],
        num_spec_steps=steps + ("odd" in BEHAVIOUR),
        num_accepted_draft_tokens=sum(accepted),
        num_draft_tokens=steps * k,
        num_spec_tokens=k,
        per_step_accepted=kept,
        per_step_drafted=[k] * steps,
    )
    return dict(metrics=dict(speculative_decoding=found))


def main():
    options = dict(zip(sys.argv[1:], sys.argv[2:]))
    if "fail" in BEHAVIOUR:
        print("(EngineCore) ValueError: no room for the cache", flush=True)
        for i in range(40):
            print(f"(APIServer) consequence {i}", flush=True)
        raise RuntimeError("Engine core initialization failed")
    # a worker: it must not outlive the server
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"worker {child.pid}", flush=True)
    config = Path(options["serve"]) / "config.json"
    drafter = config.is_file() and "speculators_model_type" in json.loads(config.read_text())
    said = json.loads(options.get("--speculative-config", "{}"))
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler)
    server.k = said.get("num_speculative_tokens", 3 if drafter else 0)
    reports = options.get("--per-request-spec-decode-metrics") == "detailed"
    if reports and not server.k:
        raise ValueError("--per-request-spec-decode-metrics requires speculative decoding to be enabled")
    server.request_metrics = lambda steps, accepted: request_metrics(server.k, steps, accepted) if reports else {}
    server.model = options["serve"]
    server.ready = time.time() + ("late" in BEHAVIOUR)
    server.lock = threading.Lock()
    server.pause, server.answered, server.accepted = float(os.environ.get("FAKE_PAUSE", 0)), 0, [0] * server.k
    names = (
        ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
        if server.k
        else []
    )
    server.counters = dict.fromkeys([*names, "request_success", "generation_tokens"], 0)
    server.serve_forever()


if __name__ == "__main__":
    main()
