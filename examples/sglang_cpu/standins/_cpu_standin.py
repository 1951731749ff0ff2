"""What a stand-in module is: every name can be imported, none can be used.

sglang and transformers import these names when they start and, for a text model on the torch_native backend, call
none of them. One that is called after all says which.
"""


def names(module):
    def __getattr__(name):
        # Dunders stay absent: the import system and inspect would take the module for what it is not.
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def absent(*args, **kwargs):
            raise RuntimeError(f"{module}.{name} was called, but {module} is a stand-in (examples/sglang_cpu)")

        absent.__name__ = absent.__qualname__ = name
        return absent

    return __getattr__
