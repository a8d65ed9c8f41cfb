from . import dash, doctor, folder, keys, launch, logs, options, parts, run_script, status, track, train, version
from .options import panel, takes
from .terminal import EXIT_BAD_INPUT, EXIT_INTERRUPTED, human, print_error, print_json, save_text, sigterm_as_interrupt
from .train import exit_interrupted, train_with

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_INTERRUPTED",
    "dash",
    "doctor",
    "exit_interrupted",
    "folder",
    "human",
    "keys",
    "launch",
    "logs",
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
    "track",
    "train",
    "train_with",
    "version",
]
