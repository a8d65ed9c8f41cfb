from . import fabric, folder, keys, options, parts, run_script, status, train
from .options import panel, takes
from .terminal import EXIT_BAD_INPUT, EXIT_INTERRUPTED, human, print_error, print_json, save_text, sigterm_as_interrupt
from .train import exit_interrupted, train_with

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_INTERRUPTED",
    "exit_interrupted",
    "fabric",
    "folder",
    "human",
    "keys",
    "options",
    "panel",
    "parts",
    "print_error",
    "print_json",
    "run_script",
    "save_text",
    "sigterm_as_interrupt",
    "status",
    "takes",
    "train",
    "train_with",
]
