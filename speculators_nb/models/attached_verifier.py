"""The verifier API of speculators 0.4: a drafter borrows embedding, head and final norm.
The verifier is on disk or in memory; the drafter may hold the whole of it, and can give everything back."""

import copy
import os
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ..core.checkpoints import resolve_checkpoint
from ..decode.generate import generate
from ..decode.proposal_setup import proposal_setup
from ..decode.tree import Sampling
from ..nn.losses import TargetHead
from ..nn.target_head import head_of_family, text_config
from ..verifier.tapped_model import Verifier, find_taps, load_model
from .base import SpeculatorModel

# EAGLE checkpoints of the speculators 0.4 line are complete without their verifier. `detached`: the drafter holds what
# its checkpoint holds. `train_only`: also the verifier's embedding, head and norm. `full`: the whole verifier, to
# generate with. In no mode does `state_dict` hold the verifier. From a folder, `train_only` reads three tensors and
# returns None: to load a verifier of 16 GB only to return it would undo what the mode is for.


class NotAttached(RuntimeError, ValueError):
    "A drafter is used that holds no verifier."


MODES = ("detached", "full", "train_only")


def check_mode(mode: str | None, modes: tuple[str, ...] = MODES) -> None:  # None: full
    "ValueError for an unknown mode of attachment."
    if mode is not None and mode not in modes:
        raise ValueError(f"verifier_attachment_mode={mode!r}: choose {' or '.join(map(repr, modes))}")


def resolve_verifier(verifier: "str | os.PathLike | PreTrainedModel") -> PreTrainedModel:  # folder, hub id, or a model
    "A verifier, loaded where it is a folder or hub id. Errors: TypeError for anything else."
    if isinstance(verifier, AttachableVerifier):
        raise TypeError(f"verifier is a {type(verifier).__name__}, a drafter; attach the model that it drafts for")
    if isinstance(verifier, PreTrainedModel):
        return verifier
    if isinstance(verifier, (str, os.PathLike)):
        return load_model(resolve_checkpoint(verifier), trust_remote_code=False).eval()
    raise TypeError(f"verifier is a {type(verifier).__name__}; give a folder, a hub id or a PreTrainedModel")


def borrowed_parts(model: PreTrainedModel) -> dict[str, Any]:  # a verifier -> as `load_verifier_tensors` returns them
    "Embedding, head and final norm of a model. Errors: ValueError where it has no head."
    norm, head = find_taps(model)[2], model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"verifier is a {type(model).__name__}, which has no output head; give the same model as a causal LM"
        )
    parts = dict(
        embeddings=model.get_input_embeddings().get_parameter("weight"),
        head=head.get_parameter("weight"),
        head_bias=getattr(head, "bias", None),
        norm_weight=norm.get_parameter("weight"),
        norm_bias=getattr(norm, "bias", None),
    )
    return {name: None if part is None else part.detach() for name, part in parts.items()}


HONOURED = {  # fields of a GenerationConfig
    *("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "transformers_version"),
}
NEUTRAL = {  # numbers that change nothing, beside None, False and what is empty
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("length_penalty", "typical_p", "guidance_scale"), 1),
}


def generation_settings(
    stored: GenerationConfig | None,  # the verifier's own
    options: dict[str, Any],  # instead of its fields
    given: GenerationConfig | None = None,  # before the stored one, field by field
) -> GenerationConfig:
    """What `generate` shall do. Errors: TypeError for an unknown option, ValueError for one
    that speculative decoding does not do."""
    if not isinstance(given, GenerationConfig | None):
        raise TypeError(f"generation_config is a {type(given).__name__}; give a GenerationConfig")
    limit = options.get("max_new_tokens")
    if isinstance(limit, str):
        raise TypeError(f"max_new_tokens={limit!r}: give a whole number")
    settings = copy.deepcopy(given or stored or GenerationConfig())
    if given is not None and stored is not None:
        for name, value in stored.to_dict().items():
            if getattr(settings, name, None) is None:
                setattr(settings, name, value)
    unknown = settings.update(**options)
    if unknown:
        raise TypeError(f"generate got {', '.join(unknown)}: not a field of GenerationConfig")
    for name, value in settings.to_diff_dict().items():
        asks_nothing = name.startswith("_") or not value or value == NEUTRAL.get(name)
        if name not in HONOURED and not asks_nothing:
            raise ValueError(
                f"{name}={value!r}: speculative decoding here knows temperature, top_k, top_p "
                f"and min_p; pass {name}=None"
            )
    return settings


def new_tokens(settings: GenerationConfig, prompt_length: int) -> int:  # padding counts, as in transformers
    "`max_new_tokens`, or what `max_length` leaves; 20 where neither is given, as transformers."
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    if settings.max_length is None:
        return 20
    if settings.max_length <= prompt_length:
        raise ValueError(
            f"max_length={settings.max_length}: the prompt has {prompt_length} tokens; give max_new_tokens"
        )
    return settings.max_length - prompt_length


def sampling_of(settings: GenerationConfig) -> Sampling:
    "Greedy unless `do_sample`; 50 likeliest tokens unless `top_k` is given, as transformers."
    if not settings.do_sample:
        return Sampling()
    return Sampling(
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_k=50 if settings.top_k is None else settings.top_k,
        top_p=1.0 if settings.top_p is None else settings.top_p,
        min_p=settings.min_p or 0.0,
    )


def stop_tokens(settings: GenerationConfig) -> list[int]:
    "Tokens that end a text. Errors: TypeError for anything but ids."
    eos = settings.eos_token_id
    if eos is None:
        return []
    try:
        return torch.as_tensor(eos).flatten().tolist()
    except (TypeError, ValueError):
        raise TypeError(f"eos_token_id={eos!r}: give a token id or a list of them") from None


def real_tokens(
    input_ids: torch.Tensor,  # [B, n] or [n]
    attention_mask: torch.Tensor | None,  # [B, n], 0 at padding
    settings: GenerationConfig,
) -> tuple[torch.Tensor, torch.Tensor]:  # prompts [B, n], which are no padding [B, n] bool
    """Prompts and where they are padded. Without a mask the pad token marks padding, unless it
    also ends texts (as transformers). Errors: TypeError for no ids, ValueError for a mask of
    another shape."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        kind = getattr(input_ids, "dtype", f"a {type(input_ids).__name__}")
        raise TypeError(f"input_ids is {kind}; give a tensor of token ids, [batch, length]")
    prompts = torch.atleast_2d(input_ids)
    pad = settings.pad_token_id
    if attention_mask is not None:
        mask = torch.atleast_2d(attention_mask).bool()
        if mask.shape != prompts.shape:
            raise ValueError(
                f"attention_mask is {[*mask.shape]} and input_ids {[*prompts.shape]}: give one entry for each token"
            )
        return prompts, mask
    if pad is None or pad in stop_tokens(settings):
        return prompts, torch.ones_like(prompts).bool()
    return prompts, prompts != pad


class AttachableVerifier(SpeculatorModel):
    """A drafter whose verifier is attached, from files or from memory, and given back again;
    with the whole verifier it generates."""

    not_saved = ("target_head.", "embed_tokens.", "lm_head.")
    from_verifier = ()  # a checkpoint is complete without its verifier
    rotary: Any  # of the draft layer, which a subclass makes
    resolve_verifier = staticmethod(resolve_verifier)

    def _forget(self):
        self.embed_tokens = self.lm_head = None  # type: ignore[assignment] (see the base)
        self.target_head = TargetHead(self.config.sizes.hidden_size)
        self.verifier_layers = None
        self._verifier = (None,)  # in a tuple, so that it is no submodule
        self.verifier_attachment_mode = "detached"

    def _borrow(self, parts, head):
        embeddings = parts["embeddings"].to(self.device, self.dtype)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings)
        rows = nn.Parameter(parts["head"].to(self.device, self.dtype), requires_grad=False)
        self.lm_head = nn.Linear(*rows.shape[::-1], bias=False, device="meta")
        self.lm_head.weight = rows
        head.load(parts | {"head": rows})

    @property
    def rotary_emb(self) -> nn.Module | None:
        "The rotary embedding of the draft layer's config; None until a verifier is attached."
        return None if self.verifier_attachment_mode == "detached" else self.rotary

    @property
    def verifier(self) -> "PreTrainedModel | None":
        'The attached verifier; only mode "full" holds one.'
        return self._verifier[0]

    def load_verifier_weights(self, verifier: str | os.PathLike | None = None):
        """Attach for training: read embedding, head and final norm from a verifier's files, and
        no more of it."""
        super().load_verifier_weights(verifier)
        self.verifier_attachment_mode = "train_only"

    def detach_verifier(self):
        "Give back everything that is the verifier's. Errors: NotAttached where there is none."
        self._check_attached()
        self._forget()

    def _check_attached(self):
        if self.verifier_attachment_mode == "detached":
            raise NotAttached("no verifier is attached; call attach_verifier(verifier)")

    def start_attached(self, verifier: "str | os.PathLike | PreTrainedModel | None", mode: str | None) -> None:
        "The end of a drafter's `__init__`."
        check_mode(mode)
        self._forget()
        if verifier is not None and mode != "detached":
            self.attach_verifier(verifier, mode)

    def attach_verifier(
        self,
        verifier: "str | os.PathLike | PreTrainedModel",  # folder, hub id, or model to share
        mode: str | None = None,  # "full" or None: hold it; "train_only": what forward needs
    ) -> "PreTrainedModel | None":  # the verifier; None where only three tensors were read
        """Borrow from a verifier. Errors: RuntimeError where one is attached already;
        ValueError for an unknown mode or a verifier of another shape."""
        if self.verifier_attachment_mode != "detached":
            raise RuntimeError("a verifier is attached already; call detach_verifier() first")
        check_mode(mode, MODES[1:])
        if mode == "train_only" and isinstance(verifier, (str, os.PathLike)):
            return self.load_verifier_weights(verifier)
        model = self.resolve_verifier(verifier)
        parts = borrowed_parts(model)
        tokens, channels = parts["embeddings"].shape
        want = (self.target_vocab_size, self.config.sizes.hidden_size)
        if (tokens, channels) != want:
            raise ValueError(
                f"the verifier embeds {tokens} tokens in {channels} channels, "
                f"transformer_layer_config says {want[0]} and {want[1]}"
            )
        head = head_of_family(model.config).to(self.device)
        self._borrow(parts, head)
        self.target_head = head
        self.verifier_layers = text_config(model.config).num_hidden_layers
        self.verifier_attachment_mode = mode or "full"
        self._verifier = (model if mode != "train_only" else None,)
        return model

    def decoding_of(self, sampling: Sampling) -> dict[str, Any]:  # drafter, rule and k
        "How to decode: by the config's default proposal method."
        drafter, of = self.drafter(), self.config.speculators_config
        if of is None:
            return dict(drafter=drafter, k=5)
        methods = {method.proposal_type: method for method in of.proposal_methods}
        setup = proposal_setup(drafter, methods[of.default_proposal_method])._asdict()
        if sampling.temperature and of.default_proposal_method == "greedy":
            setup["rule"] = "standard"  # a greedy rule would not keep the distribution
        return setup

    @torch.inference_mode()
    def generate(
        self,
        input_ids: torch.Tensor,  # [B, n] or [n] int64
        attention_mask: torch.Tensor | None = None,  # [B, n], 0 at padding; None: by the pad token
        generation_config: GenerationConfig | None = None,  # None: the verifier's own
        *,
        k: int | None = None,  # tokens drafted a step; None: as the config says
        **options: Any,  # fields of a GenerationConfig, e.g. max_new_tokens, do_sample
    ) -> torch.Tensor:  # [B, n + new], padded on the right
        """Speculative decoding with the attached verifier. Errors: NotAttached unless a whole
        one is; ValueError for an option that it does not do; TypeError for an unknown one."""
        if self.verifier is None:
            raise NotAttached(
                f"verifier_attachment_mode={self.verifier_attachment_mode!r}: generating needs "
                'the whole verifier; call attach_verifier(verifier, mode="full")'
            )
        stored = getattr(self.verifier, "generation_config", None)
        settings = generation_settings(stored, options, generation_config)
        prompts, real = real_tokens(input_ids, attention_mask, settings)
        sampling, stop = sampling_of(settings), stop_tokens(settings)
        was_training = self.training  # a drafter puts its model into eval mode
        try:
            decoding = self.decoding_of(sampling)
            if k is not None:
                decoding["k"] = k
            done: Any = generate(
                Verifier(self.verifier, decoding["drafter"].aux_layer_ids),
                prompt_ids=[ids[keep].tolist() for ids, keep in zip(prompts, real)],
                max_new_tokens=new_tokens(settings, prompts.shape[1]),
                sampling=sampling,
                eos_token_ids=stop,
                **decoding,
            )
        finally:
            self.train(was_training)
        pad = settings.pad_token_id
        fill = (stop or [0])[0] if pad is None else pad
        new = [torch.tensor(one.tokens) for one in done]
        padded = nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=fill)
        return torch.cat([prompts, padded.to(prompts)], 1)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None = None,  # folder or hub id
        *,
        verifier: "str | os.PathLike | PreTrainedModel | None" = None,  # None: from the config
        verifier_attachment_mode: str | None = None,  # None: "full", of a folder "train_only"
        **others,  # those of `SpeculatorModel.from_pretrained`
    ) -> Self:  # in eval mode
        "Load a drafter and attach its verifier."
        mode = verifier_attachment_mode
        check_mode(mode)
        ready = isinstance(verifier, PreTrainedModel)
        model = super().from_pretrained(
            pretrained_model_name_or_path,
            verifier=False if ready or mode == "detached" else verifier,
            **others,
        )
        if mode in ("detached", "full") or ready:
            if model.verifier_attachment_mode != "detached":
                model.detach_verifier()
            if mode != "detached":
                model.attach_verifier(verifier or model.config.verifier_name, mode)
        return model
