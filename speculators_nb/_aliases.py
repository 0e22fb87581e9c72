"""Import paths that differ from the layout: those of documentation and upstream, kept for good, and those of 0.1.

Written by hand, as `__init__.py` is; everything else in this package is exported from a notebook. The type checker's
view of the documented paths is in the `.pyi` files.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

PACKAGE = __name__.rpartition(".")[0]

LOSSES, FUNCTIONS = "train.upstream_losses", "train.upstream_functions"
METRICS, LAYERS = "train.upstream_metrics", "train.upstream_layers"

# documented path -> the modules that have its names
DOCUMENTED = {
    "config": ("core.config",),
    "model": ("models.base",),
    "proposals": ("core.registry",),
    "proposals.greedy": ("core.registry",),
    "convert": ("models.convert", FUNCTIONS),
    "utils": ("core.registry", "core.checkpoints", "core.files"),
    "data_generation": ("data.prepare", "data.prepared_folder"),
    "models.dflash.config": ("models.dflash",),
    "models.dflash.core": ("models.dflash",),
    "models.eagle3.config": ("models.eagle3",),
    "models.eagle3.core": ("models.eagle3",),
    "models.mtp.core": ("models.mtp", "models.mtp_network", FUNCTIONS),
    "models.peagle.core": ("models.peagle",),
    "models.base_components": ("nn.layers", LAYERS),
    "models.mlp": ("models.mlp_speculator",),
}

# path of speculators 0.9.0 that no page documents -> the same
UPSTREAM = {
    "proposals.base": ("core.registry",),
    "convert.dflash": (FUNCTIONS,),
    "convert.dflash.converter": (FUNCTIONS,),
    "convert.eagle": (FUNCTIONS,),
    "convert.eagle.eagle3_converter": (FUNCTIONS,),
    "convert.eagle.utils": (FUNCTIONS,),
    "convert.entrypoints": (FUNCTIONS,),
    "convert.mtp": (LAYERS,),
    "convert.mtp.converter": (FUNCTIONS,),
    "convert.utils": (FUNCTIONS,),
    "losses": (LOSSES, "nn.losses"),
    "losses.eager": (LOSSES,),
    "losses.utils": (LOSSES,),
    "utils.loading": ("core.checkpoints",),
    "utils.pydantic_utils": ("core.registry",),
    "utils.registry": ("core.registry",),
    "models.attention": (FUNCTIONS,),
    "models.dflash.attention": (FUNCTIONS,),
    "models.dflash.metrics": (METRICS,),
    "models.dflash.model_definitions": (LAYERS,),
    "models.dflash.utils": (FUNCTIONS,),
    "models.dflash2.config": ("models.dflash2",),
    "models.dflash2.core": ("models.dflash2",),
    "models.dflash2.metrics": (METRICS, "models.dflash2"),
    "models.dflash2.model_definitions": (LAYERS, "models.dflash2"),
    "models.dspark.config": ("models.dspark",),
    "models.dspark.core": ("models.dspark",),
    "models.dspark.metrics": (METRICS, "models.dspark"),
    "models.dspark.model_definitions": (LAYERS, "models.dspark"),
    "models.eagle3.attention": (FUNCTIONS,),
    "models.eagle3.data": (FUNCTIONS,),
    "models.eagle3.metrics": (LOSSES, METRICS),
    "models.eagle3.model_definitions": (LAYERS,),
    "models.eagle3.rotary_partial": (LAYERS,),
    "models.metrics": (LOSSES,),
    "models.mtp.config": ("models.mtp_network",),
    "models.mtp.data": (FUNCTIONS,),
    "models.mtp.model_definitions": ("models.mtp_network", FUNCTIONS, LAYERS),
    "models.peagle.attention": (FUNCTIONS,),
    "models.peagle.config": ("models.peagle",),
    "models.peagle.data": (FUNCTIONS,),
    "models.peagle.metrics": (METRICS,),
    "models.utils": (FUNCTIONS,),
    "models.xpress.config": ("models.xpress",),
    "models.xpress.core": ("models.xpress",),
    "models.xpress.metrics": (METRICS,),
    "models.xpress.model_definitions": (LAYERS,),
    "train.config": ("train.training_arguments",),
}
PATHS = DOCUMENTED | UPSTREAM

# a name that is another module's, or has another name here, in a documented path or in a module of today -> where it is
NAMES = {
    "convert.dflash.DFlashConverter": f"{FUNCTIONS}.Converter",
    "convert.dflash.converter.DFlashConverter": f"{FUNCTIONS}.Converter",
    "convert.eagle.Eagle3Converter": f"{FUNCTIONS}.Converter",
    "convert.eagle.eagle3_converter.Eagle3Converter": f"{FUNCTIONS}.Converter",
    "convert.mtp.MTPConverter": f"{FUNCTIONS}.Converter",
    "convert.mtp.converter.MTPConverter": f"{FUNCTIONS}.Converter",
    "model.DraftVocabMixin": "models.draft_network.DraftNetwork",
    "models.eagle3.shift_batch": f"{FUNCTIONS}.shift_batch",
    "models.mtp.MTPSpeculatorConfig": "models.mtp_network.MTPSpeculatorConfig",
    "models.mtp.compute_step_weights": f"{FUNCTIONS}.compute_step_weights",
    "models.mtp.shift_batch_mtp": f"{FUNCTIONS}.shift_batch_mtp",
    "models.mtp.model_definitions.MTPLayerMixin": "models.mtp_layer.MTPLayer",
    "models.dflash2.metrics.selector_training_candidates": "nn.token_loss.put_answer",
    "models.eagle3.model_definitions.LlamaDecoderEagle3FirstLayer": f"{LAYERS}.Eagle3FirstLayer",
    "models.eagle3.model_definitions.Qwen3DecoderEagle3FirstLayer": f"{LAYERS}.Eagle3FirstLayer",
    "models.eagle3.model_definitions.model_classes": f"{LAYERS}.eagle3_model_classes",
    "models.eagle3.rotary_partial.partial_neox_apply_rotary_pos_emb": f"{LAYERS}.apply_rotary_pos_emb",
    "models.utils.GEMMA_STYLE_FINAL_NORM_MODEL_TYPES": "nn.target_head.OFFSET_NORM",
}
NAMES |= {  # each drafter's, of its own module there
    f"models.{drafter}.metrics.compute_metrics": f"{METRICS}.{drafter}_metrics"
    for drafter in ("dflash", "dflash2", "dspark", "eagle3", "peagle", "xpress")
}

# path of version 0.1 -> where its names are now; gone with version 0.3
MOVED = {
    "anchors": ("nn.anchors",),
    "attention": ("nn.attention",),
    "command": ("cli.command",),
    "contract": ("serve.vllm_contract",),
    "core.tree": ("decode.tree",),
    "core.tree_growth": ("decode.tree_growth",),
    "data_generation.batch": ("data.packing", "nn.supervision"),
    "data_generation.chat": ("data.chat_encoding", "data.pipeline"),
    "data_generation.connector": ("serve.vllm_connector",),
    "data_generation.corpus": ("lab.corpus",),
    "data_generation.endpoint": ("core.http_client", "core.concurrency"),
    "data_generation.extraction": ("features.extraction_client", "features.extraction_files"),
    "data_generation.feature_file": ("features.feature_file",),
    "data_generation.feature_folder": ("features.feature_folder",),
    "data_generation.features": ("features.in_process", "features.feature_folder", "features.feature_file"),
    "data_generation.fetch": ("data.fetch_images",),
    "data_generation.files": ("data.file_reader",),
    "data_generation.images": ("data.images",),
    "data_generation.intake": ("data.row_filter",),
    "data_generation.journal": ("regenerate.journal", "regenerate.regenerated"),
    "data_generation.language": ("regenerate.language",),
    "data_generation.messages": ("data.messages",),
    "data_generation.prepare": ("data.prepare",),
    "data_generation.prepared": ("data.prepared_folder",),
    "data_generation.regenerate": (
        "regenerate.in_process",
        "regenerate.replay",
        "regenerate.journal",
        "regenerate.regenerated",
    ),
    "data_generation.regenerate_server": ("regenerate.from_server",),
    "data_generation.replay": ("regenerate.replay",),
    "data_generation.sources": ("data.sources",),
    "data_generation.template": ("data.chat_template",),
    "data_generation.tiny_verifier": ("lab.tiny_verifier",),
    "data_generation.vllm_features": ("features.from_server", "features.feature_folder"),
    "data_steps": ("cli.data_commands",),
    "decode.accept": ("decode.acceptance_rules",),
    "decode.drive": ("decode.proposal_setup",),
    "decode.methods": ("serve.vllm_methods",),
    "decode.speculative_config": ("serve.speculative_config",),
    "decode.verify": ("decode.verification",),
    "demo": ("cli.demo", "lab.demo_report"),
    "drafter_steps": ("cli.drafter_commands",),
    "evaluate.speed": ("evaluate.speedup",),
    "experiment": ("lab.experiment",),
    "growth": ("decode.tree_growth",),
    "head": ("nn.target_head", "verifier.parts"),
    "head_loss": ("nn.head_loss", "nn.token_loss", "nn.target_head"),
    "layers": ("nn.layers", "models.serving_rules", "models.drafting"),
    "mask_token": ("verifier.mask_token",),
    "nn.mask_token": ("verifier.mask_token",),
    "masks": ("nn.masks",),
    "native": ("models.formats",),
    "options": ("core.options",),
    "plot": ("core.plot",),
    "provenance": ("core.provenance",),
    "recipe": ("cli.recipe",),
    "redact": ("core.provenance",),
    "supervision": ("nn.supervision",),
    "train.drafter": ("train.train_drafter",),
    "train.feature_check": ("features.checks",),
    "train.optim": ("train.optimizers",),
    "train.rows": ("train.optimizers",),
    "train.run": ("train.run_record",),
    "tree": ("decode.tree",),
    "verifier_check": ("verifier.identity",),
    "vocab": ("nn.draft_vocabulary",),
    "weights": ("nn.step_weights",),
}

# module or package of today that had further names in version 0.1 -> where these are now
FORMER_NAMES = {
    "cli": ("cli.main",),
    "decode.generate": ("verifier.tapped_model", "decode.step"),
    "decode.suffix": ("decode.suffix_index",),
    "cli.command": ("cli.signature", "cli.program", "cli.inputs"),
    "core.config": ("core.config_fields", "core.checkpoints", "core.files"),
    "core.checkpoints": ("core.config_fields",),
    "core.option_rules": ("core.option_relations",),
    "core.options": ("core.option_rules", "core.option_relations"),
    "evaluate.engine": ("evaluate.engine_results", "evaluate.comparison"),
    "evaluate.load": ("evaluate.vllm_metrics", "evaluate.prompts"),
    "lab.corpus": ("lab.prompt_makers",),
    "lab.tiny_verifier": ("lab.tiny_model",),
    "models.mlp_speculator": ("models.token_heads",),
    "models.base": ("core.checkpoints", "nn.attention", "nn.compiled"),
    "nn.attention": ("nn.compiled",),
    "nn.head_loss": ("nn.token_loss", "nn.target_head", "nn.losses"),
    "nn.layers": ("models.serving_rules", "models.drafting"),
    "serve": ("serve.server", "serve.serve_command"),
    "serve.server": ("serve.serve_command",),
    "train.trainer": ("train.checkpoint",),
    "verifier": ("verifier.tapped_model", "verifier.identity"),
    "verifier.tapped_model": ("verifier.identity", "verifier.cache"),
}

# name of version 0.1, in the module that has it or had it -> its name of today; gone with version 0.3
RENAMED = {
    "core.config.SAID": "core.config_fields.CHECKED_FIELDS",
    "core.config.check_said": "core.config_fields.check_field_types",
    "core.config.WORDS": "core.config_fields.TYPE_NAMES",
    "decode.tree_growth.product_law": "decode.tree_growth.independent_log_probs",
    "decode.tree_growth.recurrent_law": "decode.tree_growth.recurrent_log_probs",
    "decode.tree_growth.without_return": "decode.tree_growth.draw_without_replacement",
    "decode.acceptance_rules.guessed": "decode.acceptance_rules.child_with",
    "decode.acceptance_rules.only": "decode.acceptance_rules.one_hot",
    "decode.proposal_setup.Driven": "decode.proposal_setup.ProposalSetup",
    "decode.proposal_setup.drive": "decode.proposal_setup.proposal_setup",
    "decode.suffix.Guess": "decode.suffix.Continuation",
    "models.eagle.law_losses": "models.eagle.paper_losses",
    "models.mtp.FAMILIES": "models.mtp_families.FAMILIES",
    "models.mtp.MTPLayer": "models.mtp_layer.MTPLayer",
    "models.mtp.family_part": "models.mtp_families.family_part",
    "models.mtp.prefix_rows": "models.mtp_network.prefix_rows",
    "models.mtp_native.NATIVE": "models.mtp_families.AS_MODULE",
    "models.dflash.NEUTRAL": "models.formats_dflash.NEUTRAL_VALUES",
    "models.dflash.read_research": "models.formats_dflash.read_dflash",
    "models.dflash.write_research": "models.formats_dflash.write_dflash",
    "models.eagle.RESEARCH_NAMES": "models.formats_eagle.EAGLE_NAMES",
    "models.eagle.read_research": "models.formats_eagle.read_eagle",
    "models.eagle.write_research": "models.formats_eagle.write_eagle",
    "models.eagle3.RESEARCH_NAMES": "models.formats_eagle.EAGLE3_NAMES",
    "models.eagle3.read_research": "models.formats_eagle.read_eagle3",
    "models.eagle3.write_research": "models.formats_eagle.write_eagle3",
    "models.formats.flat": "models.formats.flat_config",
    "lab.corpus.read_corpus": "lab.shipped.read_corpus",
    "lab.experiment.price": "lab.experiment.drafting_cost",
    "lab.experiment.standing": "lab.experiment.summary_table",
    "features.extraction_client.Room": "features.extraction_files.MemoryLimit",
    "features.feature_folder.log": "features.feature_rows.log",
    "features.feature_folder.sample_of": "features.feature_rows.sample_of",
    "models.medusa.ORIGINAL": "models.formats_token_heads.ORIGINAL_NAME",
    "models.medusa.read_heads": "models.formats_token_heads.read_medusa",
    "models.medusa.write_engine": "models.formats_token_heads.write_medusa",
    "models.medusa.write_original": "models.formats_token_heads.write_medusa_original",
    "models.mlp_speculator.read_published": "models.formats_token_heads.read_mlp_speculator",
    "models.mlp_speculator.shared_with": "models.formats_token_heads.storing_head",
    "models.mlp_speculator.write_published": "models.formats_token_heads.write_mlp_speculator",
    "serve.speculative_config.WORDS": "serve.speculative_fields.DOCUMENTED_SAMPLING",
    "serve.speculative_config.config_of": "serve.speculative_fields.config_of",
    "serve.speculative_config.conditional_rates": "serve.speculative_fields.conditional_rates",
    "serve.speculative_config.length_to_rates": "serve.speculative_fields.length_to_rates",
    "serve.speculative_config.named": "serve.draft_method.method_in_name",
    "serve.vllm_methods.NAMED": "serve.vllm_methods.METHOD_OF_NAME",
    "serve.vllm_methods.entry": "serve.vllm_methods.find_field",
    "serve.vllm_methods.mtp_family": "serve.vllm_methods.mtp_head",
    "serve.vllm_methods.own_head": "serve.vllm_methods.built_in_method",
    "train.optimizers.PIECE_BYTES": "train.optimizers.SLICE_BYTES",
    "train.trainer.Tally": "train.trainer.MetricSums",
    "verifier.tapped_model.unfit": "verifier.tapped_model.loading_problems",
    "head_loss.chunks": "nn.head_loss.cut_chunks",
    "losses.Law": "nn.losses.Distribution",
    "nn.head_loss.chunks": "nn.head_loss.cut_chunks",
    "nn.losses.Law": "nn.losses.Distribution",
    "regenerate.from_server.Interview": "regenerate.from_server.ServerReplay",
}

# names of version 0.1 without a successor: module of today -> helpers that nothing documented used
DROPPED: dict[str, str] = {
    "cli.data_commands": "TOKENIZER",
    "cli.demo": "STYLE write_report",
    "evaluate.acceptance": "RESULTS",
    "decode.generate": "decide",
    "decode.proposal_setup": "METHODS TREES",
    "models.mlp_speculator": "node_depths",
    "decode.suffix": "first_of_equals",
    "data.chat_encoding": "spelled_out",
    "regenerate.language": "BY_LETTER BY_SCRIPT BY_WORD OWN_LETTERS VIETNAMESE",
    "lab.experiment": "SETTINGS",
    "nn.attention": "flex_prefix",
    "serve": "INSTALL RECIPE",
    "serve.speculative_config": "ENGINES",
    "serve.vllm_methods": "SERVED_AS",
}

# modules of today that answer to further names
FORMER = FORMER_NAMES.keys() | {name.rpartition(".")[0] for name in (RENAMED | NAMES)}

# paths with documented paths below them
PARENTS = {path.rpartition(".")[0] for path in PATHS if "." in path} - {"models", "train"}  # these are folders
# documented paths that are more than another name of one module
LOOKED_UP = PARENTS | {name.rpartition(".")[0] for name in NAMES}


def _find(place):
    module, _, name = place.rpartition(".")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)


def _warn(old, new):
    text = f"{PACKAGE}.{old} is now {PACKAGE}.{new}; the old path goes with version 0.3"
    warnings.warn(text, FutureWarning, stacklevel=3)


def _lookup(path, targets, moved):
    "A module's `__getattr__`: the name in the first of the target modules that has it."

    def find(name):
        if name == "__all__":
            return sorted({name for target in targets for name in import_module(f"{PACKAGE}.{target}").__all__})
        if place := NAMES.get(f"{path}.{name}"):
            return _find(place)
        if renamed := RENAMED.get(f"{path}.{name}"):
            _warn(f"{path}.{name}", renamed)
            return _find(renamed)
        for target in () if name.startswith("__") else targets:
            module = import_module(f"{PACKAGE}.{target}")
            if hasattr(module, name):
                if moved:
                    _warn(f"{path}.{name}", f"{target}.{name}")
                return getattr(module, name)
        raise AttributeError(f"module '{PACKAGE}.{path}' has no attribute {name!r}")

    return find


class _Alias(Loader):
    "Loads an old path: the module of today itself where there is one, else a module that looks names up in several."

    def __init__(self, path):
        self.path = path

    def create_module(self, spec):
        return None

    def get_code(self, fullname):
        new = (PATHS.get(self.path) or MOVED[self.path])[0]
        raise ImportError(f"{fullname} is now {PACKAGE}.{new}: run python -m {PACKAGE}.{new}")

    def exec_module(self, module):
        path = self.path
        targets = PATHS.get(path) or MOVED[path]
        if path in MOVED:
            _warn(path, " and ".join(targets))
        if len(targets) == 1 and path not in LOOKED_UP:
            sys.modules[module.__name__] = import_module(f"{PACKAGE}.{targets[0]}")
        else:
            module.__path__ = []  # as of a package: imports look for paths below it
            module.__getattr__ = _lookup(path, targets, moved=False)


class _Extended(SourceFileLoader):
    "Loads a module of today, and lets documented paths be below it, or names of version 0.1 be in it."

    def exec_module(self, module):
        super().exec_module(module)
        path = module.__name__.removeprefix(f"{PACKAGE}.")
        if path in PARENTS:
            module.__path__ = []
        if path in FORMER:
            module.__getattr__ = _lookup(path, FORMER_NAMES.get(path, ()), moved=True)
        if path == "models":
            module.__getattr__ = lambda name: getattr(import_module(f"{PACKAGE}.{_model_of(name)}"), name)


def _model_of(name):
    "The module that defines a public class of `models`."
    module = sys.modules[PACKAGE]._public_names().get(name, "")
    if not module.startswith("models."):
        raise AttributeError(f"module '{PACKAGE}.models' has no attribute {name!r}")
    return module


class _Finder:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        name = fullname[len(PACKAGE) + 1 :]
        if name in PATHS or name in MOVED:
            return ModuleSpec(fullname, _Alias(name))
        if name in PARENTS or name in FORMER or name == "models":
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.origin is not None:
                spec.loader = _Extended(fullname, spec.origin)
            return spec
        return None


def install():
    "Let imports find the old paths. Done once, by the package's `__init__`."
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
