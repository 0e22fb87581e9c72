"""Multimodal conversations: pictures found, fetched from the public network only, checked; token ids by the
verifier's processor. Loss masks are carried over from the text; pixel values are computed when features are made."""

import base64
import binascii
import contextlib
import copy
import functools
import hashlib
import io
import ipaddress
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import numpy as np
import torch
from datasets import Dataset
from PIL import Image, ImageOps, UnidentifiedImageError

from ..core.files import atomic_write, file_digest
from ..core.http_client import proxy_for, read_reply, time_left, time_limit
from .chat_encoding import Rows, check_ids, read_conversation, token_mask
from .chat_template import ALL, ChatTemplate, Trained, load_processor, merge_turns, texts_in, turns_of
from .messages import BadRow, Conversation, as_json, check_text, in_a_spelling, parts_of, tools_of
from .prepared_folder import config_of

NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


def is_public(address: str) -> bool:
    """Whether anybody on the Internet can reach an IPv4 or IPv6 address: none that is private, loopback, link-local,
    multicast, reserved, unspecified or a tunnel. ValueError: it is no address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6:
        if ip.teredo:
            return False
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in NAT64 or int(ip) >> 32 == 0:  # the latter: IPv4-compatible, RFC 4291
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def public_addresses(host: str, port: int) -> list[str]:
    "Where a connection to a host may go. ValueError: its name has no address, or one that is not public."
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(f"the host {host[:80]!r} has no address") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if not is_public(address):
            raise ValueError(
                f"the host {host[:80]!r} is {address}, an address inside of this network: nothing is fetched there"
            )
    return addresses


PICTURE_BYTES, PICTURE_SECONDS, HOPS = 32 << 20, 60, 5


def _addresses(url, proxy) -> list[str]:
    "Where to connect for one hop: to addresses that are public; a name that only a proxy can look up is left to it."
    try:
        socket.getaddrinfo(url.host, None)
    except (OSError, UnicodeError):
        if proxy:
            return [url.host]
    addresses = public_addresses(url.host, url.port or 443)
    return [url.host] if proxy else addresses


@contextlib.contextmanager
def _reply(address):
    """(address, reply) of one hop, over http or https, without a password. The connection goes to an address that was
    found to be public: the name could lead elsewhere a moment later."""
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, UnicodeError):
        raise ValueError("not an address") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"the scheme {url.scheme[:20]!r} is not fetched: only http and https are")
    if url.userinfo:
        raise ValueError("an address with a password in it is not fetched")
    proxy = proxy_for(url)
    headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
    with httpx.Client(proxy=proxy, verify=httpx.create_ssl_context(), trust_env=False, headers=headers) as client:
        request = client.build_request("GET", url, timeout=time_left(PICTURE_SECONDS))
        request.extensions["sni_hostname"] = url.host
        *others, last = _addresses(url, proxy)
        for host in (*others, last):
            request.url = url.copy_with(host=host)
            try:
                reply = client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if host == last:
                    raise
                continue
            with contextlib.closing(reply):
                yield url, reply
            return


def shown_address(address: str) -> str:
    "An address for a message, without query, fragment and password, which can be secrets."
    try:
        parts = urlsplit(address)
    except ValueError:
        return "…"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:100]


def fetch_picture(address: str) -> bytes:
    """Fetch from the public network (http, https). BadRow naming the address: one that is not public, a redirection
    that leads there or does not end, a status, the size, the time."""
    where = shown_address(address)
    try:
        with time_limit(PICTURE_SECONDS):
            for _ in range(HOPS + 1):
                with _reply(address) as (url, reply):
                    if not reply.has_redirect_location:
                        if reply.status_code != 200:
                            raise ValueError(f"status {reply.status_code}")
                        return read_reply(reply, PICTURE_BYTES)
                    address = str(url.join(reply.headers["location"]))
        raise ValueError(f"more than {HOPS} redirections")
    except httpx.TimeoutException:
        raise BadRow(f"a picture is not there within {PICTURE_SECONDS:g} s", where) from None
    except (httpx.HTTPError, ValueError) as e:
        reason = "a picture cannot be fetched; save it beside the data"
        raise BadRow(reason, where, str(e) or type(e).__name__) from None


ORIENTATION = 0x0112  # EXIF's tag


def is_turned(picture: Image.Image) -> bool:
    "Whether its EXIF data say that a picture lies on its side or is mirrored; False where they cannot be read."
    try:
        return picture.getexif().get(ORIENTATION, 1) != 1
    except Exception:  # of any kind
        return False


def upright(picture: Image.Image, where: str) -> Image.Image:
    """A picture, which messages call `where`, as RGB, turned as its EXIF data say; of an animation the first frame: as
    transformers loads one. BadRow: it is damaged."""
    try:
        picture.load()
        return (ImageOps.exif_transpose(picture) if is_turned(picture) else picture).convert("RGB")
    except Exception as e:  # of Pillow's decoders, which raise many kinds
        raise BadRow("the picture is damaged; save it again", where, str(e)) from None


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PIXELS: int = Image.MAX_IMAGE_PIXELS or 89_478_485  # 270 MB as RGB


def open_picture(source: bytes | Path, where: str = "a picture") -> Image.Image:
    """Look at the header of a picture, its content or its file, which messages call `where`; it is not decoded, and its
    `format` is one of FORMATS, or MPO (several JPEGs). BadRow: another format, too many pixels, or damaged."""
    try:
        picture = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except UnidentifiedImageError:
        reason = f"no picture in a format that is known; convert it to one of {', '.join(FORMATS)}"
        raise BadRow(reason, where) from None
    except Image.DecompressionBombError:
        raise BadRow(f"more than {PIXELS} pixels; make it smaller", where) from None
    except (OSError, ValueError, SyntaxError) as e:
        raise BadRow("the picture cannot be read; save it again", where, str(e)) from None
    if picture.width * picture.height > PIXELS:
        size = f"{picture.width} x {picture.height}"
        raise BadRow(f"more than {PIXELS} pixels; make it smaller", where, size)
    return picture


def load_picture(file: Path) -> Image.Image:
    "The picture in a file, `upright`. BadRow: it is missing, damaged, too large, or in a format that is not known."
    with open_picture(file, str(file)) as picture:
        return upright(picture, str(file))


def for_server(file: Path) -> tuple[str, bytes]:
    """The kind (png, …) and the bytes of a picture's file for a server, which does not read EXIF data, and transparency
    otherwise than transformers: as they are, or those of the picture `upright`. BadRow: as of `load_picture`."""
    with open_picture(file, str(file)) as picture:
        if picture.format in FORMATS and picture.mode == "RGB" and not is_turned(picture):
            return picture.format.lower(), file.read_bytes()
    with io.BytesIO() as f:
        load_picture(file).save(f, "PNG")
        return "png", f.getvalue()


def picture_file(part: dict) -> Path | None:
    """The file of a picture in a prepared row, a part of `resolve_images`; None: the part is no picture. ValueError: it
    is elsewhere than in a file."""
    if part.get("type") != "image_url":
        return None
    address = part.get("image_url")
    url = address.get("url") if isinstance(address, dict) else None
    if not isinstance(url, str) or not url.startswith("file:///"):
        raise ValueError(
            f"a picture of a prepared row at {shown_address(str(url))!r}, expected a file:// "
            "address; prepare the data again"
        )
    return Path(unquote(urlsplit(url).path))


def unchanged_file(part: dict) -> Path | None:
    "As `picture_file`. BadRow: there is another picture than when the row was prepared."
    file = picture_file(part)
    digest = part.get("sha256")  # tables fill in None
    if file and digest and file.is_file() and file_digest(file).hex() != digest:
        raise BadRow("the picture has changed since the row was prepared; prepare the data again", str(file))
    return file


def changed_picture(rows: Dataset, since: float) -> str | None:
    """The first picture of a prepared table that there is another of, among the files that were touched after `since`
    (seconds of the clock): of many pictures few are read. None: there is none, or it is missing."""
    if "messages" not in rows.column_names:
        return None
    row: Any
    for row in rows.with_format(None).select_columns(["messages"]):
        for part in parts_of(row["messages"]):
            try:
                file = picture_file(part)
                if file and file.is_file() and file.stat().st_ctime >= since:
                    unchanged_file(part)
            except BadRow as e:
                return e.at
    return None


def picture_inside(part: dict | str) -> dict | str:
    """A part of `resolve_images` as a server takes it, which may not be able to read a picture's file: its bytes are in
    a data: address. BadRow: as of `for_server`."""
    file = unchanged_file(part) if isinstance(part, dict) else None
    if file is None:
        return part
    kind, content = for_server(file)
    data = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def _content(source, at, is_base64, allow_urls):
    "What a source holds or names: the bytes of a picture, fetched where an address is allowed, or its file."
    if isinstance(source, dict):  # as `datasets` stores pictures
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Image.Image):
        with io.BytesIO() as f:
            upright(source, at).save(f, "PNG")
            return f.getvalue()
    if isinstance(source, str) and (is_base64 or source.startswith("data:")):
        try:
            return base64.b64decode(source.split(",", 1)[-1], validate=True)
        except (binascii.Error, ValueError) as e:
            raise BadRow("a picture's base64 is damaged", at, str(e)) from None
    if isinstance(source, str) and re.match(r"https?://", source):
        if not allow_urls:
            raise BadRow(
                "a picture would be fetched from the network; save it beside the data, or pass allow_urls=True",
                at,
                shown_address(source),
            )
        return fetch_picture(source)
    return source


def _stored(content, at, store):
    "The file of a picture's content, which is written once."
    if store is None:
        raise BadRow("a picture inside the message, and no folder to store it in", at, f"{len(content)} bytes")
    with open_picture(content, f"{at}, a picture of {len(content)} bytes") as picture:
        suffix = str(picture.format).lower()
    path = Path(store) / f"{hashlib.sha256(content).hexdigest()[:20]}.{suffix}"
    if not path.is_file():
        with atomic_write(path) as tmp:
            tmp.write_bytes(content)
    return path


def _local(source, at, folder):
    "A picture's file inside of the folder."
    name = str(source)
    if not isinstance(source, (str, Path)) or not 0 < len(name) <= 4000 or "\0" in name:
        raise BadRow("a picture is no path, address or base64", at, repr(name[:40]))
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder.resolve())
        exists = path.is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long, a link to itself
        path, inside, exists = folder / name, True, False
    if not inside:
        reason = f"a picture lies outside of {str(folder)!r}; pass the folder that holds all pictures as image_folder"
        raise BadRow(reason, at, repr(name[:80]))
    if not exists:
        reason = f"no such picture in {str(folder)!r}; pass the folder that the paths start from as image_folder"
        raise BadRow(reason, at, repr(name[:80]))
    open_picture(path, f"{at}, the picture {name[:80]!r}").close()
    return path


def resolve_images(
    row: dict | Conversation,  # a conversation in any format
    folder: str | Path = ".",  # pictures' paths start here, and may not leave it
    store: str | Path | None = None,  # folder for pictures given as bytes; None: refuse them
    allow_urls: bool = False,  # fetch http(s) addresses into `store`
) -> list[dict]:  # messages; pictures: {"type": "image_url", "image_url": {"url": "file:///…"}, "sha256": …}
    """Normalise messages, and find every picture. BadRow: a path that leads out, an address
    that is not allowed, a kind of part that is not known."""
    conversation = read_conversation(row)
    columns = conversation.images or ()
    beside = [*columns] if isinstance(columns, (list, tuple)) else [columns]

    def resolved(part, at):
        "One part of a message."
        if isinstance(part, str) or part["type"] == "text":  # `normalize` knows the kinds
            return {"type": "text", "text": part if isinstance(part, str) else part["text"]}
        names = (k for k in ("image_url", "path", "url", "base64", "image") if part.get(k) is not None)
        source = part.get(next(names, None))
        if isinstance(source, dict) and source.get("url") is not None:
            source = source["url"]
        if source is None:
            if not beside:
                raise BadRow("a picture without path, url or base64, and none left in 'images'", at)
            source = beside.pop(0)
        source = _content(source, at, part.get("base64") is not None, allow_urls)
        path = _stored(source, at, store) if isinstance(source, bytes) else _local(source, at, Path(folder))
        address = {"url": path.absolute().as_uri()}
        return {"type": "image_url", "image_url": address, "sha256": file_digest(path).hex()}

    messages = copy.deepcopy(conversation.messages)
    for i, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str) and beside and message["role"] == "user":
            content = _split_at_marks(content)
        if isinstance(content, list):
            content = [resolved(part, f"message {i}") for part in content]
        message["content"] = content
    if beside:
        raise BadRow(
            "more pictures than the messages have places for ('<image>', or parts of type image)",
            detail=f"{len(beside)} more",
        )
    return messages


def _split_at_marks(text):
    "LLaVA's `<image>` in a text, as parts; a text without it stays."
    first, *rest = re.split(r"\n?<image>\n?", text)
    if not rest:
        return text
    parts = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def pictures_of(messages: list[dict]) -> list[Image.Image]:
    "The pictures of `resolve_images`, as of `load_picture`, in the order of their places."
    return [load_picture(file) for part in parts_of(messages) if (file := unchanged_file(part))]


def for_template(messages: list[dict]) -> list[dict]:
    'Messages of `resolve_images` for the chat template, which looks for {"type": "image"}.'
    out = []
    for message in messages:
        if isinstance(message.get("content"), list):
            content = [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]
            message = message | {"content": content}
        out.append(message)
    return out


def process(text: str, messages: list[dict], processor) -> dict[str, torch.Tensor]:
    """Arguments of the model (input_ids [1, n], pixel_values, …) that a processor makes of messages of
    `resolve_images`, and of their rendered text with a placeholder for each picture. BadRow: it cannot."""
    pictures = pictures_of(messages) or None
    mark = getattr(processor, "image_token", None)
    for i, message in enumerate(messages):
        if any(mark and mark in words for words in texts_in(message)):
            raise BadRow(f"a text spells {mark!r}, which stands for a picture; take it out", f"message {i}")
    try:
        return dict(processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False))
    except Exception as e:  # of any kind
        why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}"
        raise BadRow("the processor does not take the pictures or the text", detail=why) from e


def carry_mask(mask: np.ndarray, short: list[int], full: list[int]) -> np.ndarray:
    """The mask [m] bool of a row as the processor expands it, `full` [m], by that of the row with one placeholder a
    picture, `mask` [n] bool of the ids `short` [n]; the tokens of a picture are not trained. BadRow: a trained token
    has no partner."""
    counts = Counter(full)
    counts.subtract(short)
    # ids that both have equally often stand in the same order; what is between two of them is the same, too, unless
    # there is a picture
    ours, theirs = ([i for i, token in enumerate(ids) if not counts[token]] for ids in (short, full))
    out, lost, begin, start = np.zeros(len(full), bool), 0, 0, 0
    if [short[i] for i in ours] != [full[j] for j in theirs]:
        ours, theirs, lost = [], [], int(mask.sum())
    for end, stop in zip([*ours, len(short)], [*theirs, len(full)]):
        between = short[begin:end]
        if between == full[start:stop]:
            out[start:stop] = mask[begin:end]
        elif Counter(between) - Counter(full[start:stop]):
            lost += int(mask[begin:end].sum())
        out[stop : stop + 1] = mask[end : end + 1]
        begin, start = end + 1, stop + 1
    if lost:
        reason = "trained tokens are not in what the processor made of the text, so the mask cannot be carried over"
        raise BadRow(reason, detail=f"{lost} of {int(mask.sum())}")
    return out


def encode_images(
    messages: list[dict],  # from `resolve_images`
    template: ChatTemplate,  # of a processor
    tools: list[dict] | None = None,  # as from `tools_of`
    rows: str = "conversation",  # "turn": a row per assistant turn, only that turn trained
    first: int | None = None,  # tokens beyond which a row is of no use; None: all are needed
    vocab_size: int | None = None,  # the verifier's; None: unknown
    trained: Trained = ALL,  # what of the answers is trained
) -> Rows:  # (input_ids int32 [n], loss_mask bool [n], messages of the row, tools) per row
    """`chat_encoding.encode_batch` for one conversation with pictures. A row of `first` tokens
    or more has no pictures and an empty mask."""
    turns = in_a_spelling(for_template(messages), lambda m: turns_of(m, template, tools, trained=trained))
    ends = [j + 1 for j, m in enumerate(messages) if m["role"] == "assistant"]
    ends = ends[len(ends) - len(turns) :]  # an answer to nobody is no turn
    end_of = {text: end for (text, _), end in zip(turns, ends)}
    spelled = [
        there | {"content": m["content"]} if isinstance(m["content"], list) else there
        for m, there in zip(messages, turns.messages)
    ]
    out = Rows()
    out.omitted = turns.omitted
    for text, spans in merge_turns(turns, rows):
        (short,) = template.tokens([check_text(text)], first)
        context = spelled[: end_of[text]]
        ids, mask = np.array(short.ids, np.int32), np.zeros(len(short.ids), bool)
        if not first or len(ids) < first:
            short_mask = token_mask(template, short, spans, text)
            full = process(text, context, template.owner)["input_ids"][0].tolist()
            ids, mask = np.array(full, np.int32), carry_mask(short_mask, short.ids, full)
        check_ids(ids, vocab_size)
        out.append((ids, mask, context, tools))
    return out


def inputs_of(row: dict, template: ChatTemplate) -> dict[str, torch.Tensor]:
    """What the verifier takes beside the ids of a row (input_ids, messages) of a prepared table, by the template that
    it was made with: its pictures, as tensors; empty: the row is text. ValueError if messages and ids do not belong
    together (other pictures, other processor)."""
    messages: Any = as_json(row.get("messages"), "messages") or []
    if not parts_of(messages):
        return {}
    made = process(template(for_template(messages), tools_of(row))[0], messages, template.owner)
    ids = [int(t) for t in row["input_ids"]]
    if made["input_ids"][0].tolist() != ids:
        raise ValueError(
            f"the row has {len(ids)} tokens, its messages give {made['input_ids'].shape[1]} or "
            "others: pictures, processor or template have changed. Prepare the data again."
        )
    names = made.keys() - {"input_ids", "attention_mask"}
    return {k: v for k, v in made.items() if k in names and isinstance(v, torch.Tensor)}


class RowInputs:
    """Row of a prepared table -> what the verifier takes beside its ids: pictures, as tensors, made when the row is
    read; {} for text. The processor is that of `load_processor`, or its folder, loaded when the first picture comes. A
    loader's worker may get a copy."""

    def __init__(self, dataset: Dataset, processor: Any):
        self.processor = processor
        self.table: Any = dataset.with_format(None) if "messages" in dataset.column_names else None

    @functools.cached_property
    def template(self) -> ChatTemplate:
        "That of the processor, with the arguments of the table's preparation."
        given = self.processor
        loaded = load_processor(given) if isinstance(given, (str, Path)) else given
        return ChatTemplate(loaded, **config_of(self.table).get("origin", {}).get("template_kwargs", {}))

    def __getstate__(self) -> dict[str, Any]:
        "Without the template, which a copy loads itself: not every processor can be sent to a process."
        return {"processor": self.processor, "table": self.table}

    def __call__(self, i: int) -> dict:
        if self.table is None:
            return {}
        row = self.table[i]
        messages: Any = as_json(row["messages"], "messages") or []  # text, where upstream's library wrote them
        return inputs_of(row, self.template) if parts_of(messages) else {}
