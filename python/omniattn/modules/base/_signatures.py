"""The signatures of the layers, for type checkers alone, which read _signatures.pyi."""


def __getattr__(layer: str) -> None:
    if layer.startswith("__"):
        raise AttributeError(layer)
