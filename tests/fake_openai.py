"""An OpenAI-compatible server for tests, in a process of its own, that answers by rule and fails on order.

    with FakeServer(tokenizer=folder) as server:
        server.fault("500", count=3)              # the next three requests for work fail
        server.fault("reset", match="question 7") # ... or those whose body contains a text
        server.kill(); server.restart()           # SIGKILL; again on the same port
        server.seen()                             # every body that was asked, with the Authorization header as
        "authorization"
        server.set(mute=True, faults=[])          # an option changed, all orders forgotten

Faults: a status ("429", "500", "400", …; its message repeats the Authorization header, as careless servers do), "reset"
(the connection is
cut), "slow:SECONDS", "garbage" (not JSON), "torn" (half of the answer), "kill" (the server kills itself with SIGKILL).
An answer is `reply(the last user message)`, different for each seed; with a tokenizer, prompts are rendered and
`return_token_ids` is obeyed
as vLLM does it (with "letters" for a tokenizer, tokens are bytes and nothing large is imported). A message "use NAME"
is answered by a call of the tool NAME, "use A and B" by two calls.
"""

import argparse
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

MODEL = "fake"


class Letters:
    "A tokenizer whose tokens are bytes."

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **_):
        return bytes(i for i in ids if i).decode()

    def apply_chat_template(self, messages, **_):
        return self(
            "".join(f"[{m['role']}]{m.get('content') or m.get('tool_calls')}" for m in messages) + "[assistant]"
        )


def reply(text, seed=None, words=12):
    "What the server says: words that the question (and the seed) decide."
    digest = hashlib.sha256(f"{text}/{seed}".encode()).hexdigest()
    return "I say " + " ".join(digest[i * 3 : i * 3 + 3] for i in range(4 + int(digest[-1], 16) % words)) + "."


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def say(self, answer, status=200, headers=()):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(data))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        answers = {
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]},
            "/health": {},
            "/seen": self.server.seen,
        }
        self.say(answers[self.path]) if self.path in answers else self.say({"detail": "Not Found"}, 404)

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        if self.path == "/faults":
            self.server.faults.append(body)
            return self.say({})
        if self.path == "/set":
            vars(self.server).update(body)
            return self.say({})
        with self.server.lock:
            self.server.seen.append({"path": self.path, "authorization": self.headers["Authorization"], **body})
            fault = next((f for f in self.server.faults if f["match"] in raw.decode()), None)
            if fault:
                fault["count"] -= 1
                if not fault["count"]:
                    self.server.faults.remove(fault)
        kind, _, value = (fault["kind"] if fault else "").partition(":")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "slow":
            time.sleep(float(value))
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        if kind == "garbage":
            return self.say(b"<html>starting</html>")
        if kind.isdigit():
            return self.say(
                {"error": {"message": f"fault {kind}; you sent {self.headers['Authorization']}"}},
                int(kind),
                [("Retry-After", "0")] if kind == "429" else [],
            )
        time.sleep(self.server.delay)
        answer = {"/v1/chat/completions": self.chat, "/v1/completions": self.complete}[self.path](body)
        if kind == "says":
            return self.say(value.encode())
        if kind == "ends":
            answer["choices"][0]["finish_reason"] = value
        answer = json.dumps(answer).encode()
        if kind == "torn":
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer[: len(answer) // 2])
            self.close_connection = True
            return
        self.say(answer)

    def finish_choice(self, body, text, prompt_ids):
        "(text, reason, token ids or None), cut at max_tokens"
        tokenizer = self.server.tokenizer
        if tokenizer is None:
            return text, "stop", None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 10**6
        return (
            (text, "stop", ids)
            if len(ids) <= limit
            else (tokenizer.decode(ids[:limit], skip_special_tokens=True), "length", ids[:limit])
        )

    def chat(self, body):
        question, tokenizer = body["messages"][-1]["content"] or "", self.server.tokenizer
        prompt = (
            tokenizer
            and tokenizer.apply_chat_template(
                body["messages"],
                add_generation_prompt=True,
                return_dict=True,
                tools=body.get("tools"),
                **body.get("chat_template_kwargs", {}),
            )["input_ids"]
        )
        message = {"role": "assistant", "content": None}
        if question.startswith("use "):
            message["tool_calls"] = [
                {
                    "id": f"call-{len(self.server.seen)}-{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps({"of": question})},
                }
                for i, name in enumerate(question.removeprefix("use ").split(" and "))
            ]
            text = "".join(f"<tool_call>{json.dumps(c['function'])}</tool_call>" for c in message["tool_calls"])
            reason = "tool_calls"
            ids = tokenizer and tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        else:
            text, reason, ids = self.finish_choice(body, reply(question, body.get("seed")), prompt)
            message["content"] = text
            if self.server.thinks:
                message["reasoning_content"] = "because " + text[:9]
        tell = body.get("return_token_ids") and tokenizer and not self.server.mute
        return {
            "id": "x",
            "object": "chat.completion",
            "model": MODEL,
            "choices": [
                {"index": 0, "message": message, "finish_reason": reason, **({"token_ids": ids} if tell else {})}
            ],
            "usage": {"prompt_tokens": len(prompt or []), "completion_tokens": len(ids or [])},
            **({"prompt_token_ids": prompt} if tell else {}),
        }

    def complete(self, body):
        prompts, tokenizer = body["prompt"], self.server.tokenizer
        prompts = prompts if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else [prompts]
        choices = []
        for i, prompt in enumerate(prompts):
            ids = prompt if isinstance(prompt, list) else tokenizer and tokenizer(prompt)["input_ids"]
            text, reason, out = self.finish_choice(body, reply(prompt, body.get("seed")), ids)
            tell = body.get("return_token_ids") and out is not None and not self.server.mute
            choices.append(
                {
                    "index": i,
                    "text": text,
                    "finish_reason": reason,
                    **({"token_ids": out, "prompt_token_ids": ids} if tell else {}),
                }
            )
        return {"id": "x", "object": "text_completion", "model": MODEL, "choices": choices, "usage": {}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokenizer")
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--mute", action="store_true", help="knows no return_token_ids")
    parser.add_argument("--thinks", action="store_true", help="gives reasoning_content")
    opt = parser.parse_args()
    ThreadingHTTPServer.daemon_threads, ThreadingHTTPServer.request_queue_size = True, 256
    server = ThreadingHTTPServer(("127.0.0.1", opt.port), Handler)
    server.lock = threading.Lock()
    server.faults = []
    server.seen = []
    server.delay = opt.delay
    server.mute = opt.mute
    server.thinks = opt.thinks
    server.tokenizer = None
    if opt.tokenizer == "letters":
        server.tokenizer = Letters()
    elif opt.tokenizer:
        from transformers import AutoTokenizer

        server.tokenizer = AutoTokenizer.from_pretrained(opt.tokenizer)
    print(server.server_port, flush=True)
    server.serve_forever()


class FakeServer:
    "The server in a process of its own."

    def __init__(self, tokenizer=None, **options):
        self.options = [
            x
            for k, v in dict(tokenizer=tokenizer, **options).items()
            if v
            for x in ([f"--{k}"] if v is True else [f"--{k}", str(v)])
        ]
        self.port = 0

    def restart(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--port", str(self.port), *self.options], stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())

    def __enter__(self):
        self.restart()
        return self

    def __exit__(self, *args):
        self.kill()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def fault(self, kind, count=1, match=""):
        "Order a failure of the next `count` requests whose body contains `match`; a negative count is all of them."
        self._post("/faults", kind=kind, count=count, match=match)

    def set(self, **options):
        "Change what the command line said (mute, thinks, delay), or `faults=[]`."
        self._post("/set", **options)

    def _post(self, path, **body):
        urlopen(Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})).close()

    def seen(self):
        with urlopen(self.url + "/seen") as answer:
            return json.load(answer)


if __name__ == "__main__":
    main()
