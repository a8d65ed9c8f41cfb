"""`atoll keys`: who may be who in a run on several machines."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.terminal import human
from atoll.core import Role

keys = typer.Typer(no_args_is_help=True, help="A key for each learner, observer and operator; and certificates.")

Folder = Annotated[Path, typer.Argument(help="Folder of the keys.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Name of the key; a learner's is its id.", show_default=False)]
Days = Annotated[int, typer.Option(help="Days for which the syncer's certificate is good.")]


@keys.command("init")
def init(
    folder: Folder,
    *,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address of the syncer's host, as learners type it; give all (default this host's name)."
        ),
    ] = None,
    days: Days = 365,
) -> None:
    """Make a certificate authority, a certificate for the syncer, and an empty registry of keys.

    ca.key never leaves this folder. The syncer's hosts need keys.json, cert.pem and key.pem; everybody else ca.pem.
    """
    from atoll.keys import make_authority

    names = name or [socket.gethostname()]
    make_authority(folder, names, days=days)
    _say(f"{folder}: ca.pem and ca.key, cert.pem and key.pem for {', '.join(names)} ({days} days), keys.json")


@keys.command("issue")
def issue(
    folder: Folder,
    name: Name,
    *,
    role: Annotated[
        Role, typer.Option(help="learner: trains under its name. observer: sees the status. operator: also `leave`.")
    ] = Role.LEARNER,
    tokens_per_step: Annotated[
        int, typer.Option(help="Tokens that a step of this learner processes, if you know; bounds what it weighs.")
    ] = 0,
    to: Annotated[
        Path | None, typer.Option(help="File for the token (mode 0600); - prints it (default NAME.token).")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also if it has a key that is valid: that one ends.")] = False,
) -> None:
    """Issue a key. Its token goes to its owner, as the file that ATOLL_TOKEN_FILE names; nobody else has it.

    The registry (keys.json) holds a hash of it. Copy the registry to the syncer's host if that is another one.
    """
    from atoll.keys import issue, write_private

    token = issue(folder, name, role, tokens_per_step=tokens_per_step, again=again)
    if str(to) == "-":
        print(token)
        return
    path = to or Path(f"{name}.token")
    write_private(path, f"{token}\n".encode())
    _say(f"{path}: the token of {role} {name!r}")


@keys.command("revoke")
def revoke(folder: Folder, name: Name) -> None:
    """End a key. A syncer that reads this registry ends its owner's session and transfers within a second."""
    from atoll.keys import revoke

    revoke(folder, name)
    _say(f"the key of {name!r} is revoked")


@keys.command("list")
def list_keys(folder: Folder) -> None:
    """List the keys: name, role, declared tokens per step, when it was made, and whether it was revoked."""
    from atoll.keys import read_keys, registry_path

    for name, key in sorted(read_keys(registry_path(folder)).items()):
        state = f"revoked {key.revoked}" if key.revoked else "valid"
        print(f"{name}\t{key.role}\t{key.tokens_per_step or '-'}\t{key.created}\t{state}")


@keys.command("renew")
def renew(
    folder: Folder,
    *,
    name: Annotated[
        list[str] | None, typer.Option(help="Names and addresses of the syncer's hosts (default those it had).")
    ] = None,
    days: Days = 365,
) -> None:
    """Make a new certificate for the syncer, by the same authority. Copy cert.pem and key.pem to the syncer's hosts.

    A syncer takes it when it is started again; learners need nothing.
    """
    from atoll.keys import renew_certificate

    names = renew_certificate(folder, name or (), days=days)
    _say(f"{folder}/cert.pem and key.pem: for {', '.join(names)} ({days} days)")


def _say(text: str) -> None:
    human(json_wanted=False).print(text, markup=False, highlight=False, soft_wrap=True)
