"The model and the config of every drafter, imported on first use."


def __getattr__(name):
    from importlib import import_module

    from speculators_nb import _public_names

    module = _public_names().get(name, "")
    if not module.startswith("models."):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"speculators_nb.{module}"), name)
