"""`atoll shards`: who has which fragment of a running run, and changing that while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, print_json

if TYPE_CHECKING:
    from atoll.wire import ClientOptions

shards = typer.Typer(
    help="See which shard has which fragment of a running run, and move them; where learners have keys, with an "
    "operator's.",
    no_args_is_help=True,
)
Run = Annotated[str, typer.Argument(help="HOST:PORT of the syncer, or the run folder of one on this machine.")]
Shard = Annotated[str, typer.Argument(help="Name or HOST:PORT of a shard, as `atoll shards list` shows it.")]


@shards.command("list")
def list_shards(
    run: Run,
    *,
    json: o.Json = False,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Show who has what, and what is being moved."""
    from atoll.launch import shards_of

    answer, found = shards_of(_reached(run, context, token, token_file, tls_ca, tls_name))
    change = answer.get("shard_change", {})
    if json:
        print_json({"shards": found, "change": change})
        return
    console = human(json_wanted=False)
    for shard in found:
        own = shard.get("fragments", [])
        away = f"; away: {shard['away']}" if shard.get("away") else ""
        has = f"fragments {', '.join(map(str, own))} ({shard.get('bytes', 0) / 1e6:.1f} MB)" if own else "nothing"
        console.print(
            f"{shard['name']}  {shard['address']}  {has}{away}", markup=False, soft_wrap=True, highlight=False
        )
    if change.get("state"):
        console.print(f"last change, {change['state']}: {change['text']}", markup=False, soft_wrap=True)


@shards.command()
def move(
    run: Run,
    to: Shard,
    fragments: Annotated[list[int], typer.Argument(help="The fragments that go there, such as 0 4 7.")],
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Move fragments to another shard while the run goes on. Nobody waits for it, and no bit changes."""
    _change(_reached(run, context, token, token_file, tls_ca, tls_name), "move", to, fragments)


@shards.command()
def add(
    run: Run,
    address: Annotated[str, typer.Argument(help="HOST:PORT of an `atoll shard`, which learners must reach as well.")],
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Take one more shard in. Fragments move there until all have about as many bytes."""
    _change(_reached(run, context, token, token_file, tls_ca, tls_name), "add", o.shard_addresses(address)[0], [])


@shards.command()
def remove(
    run: Run,
    shard: Shard,
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Move a shard's fragments to the others and take it out. Its process may be ended then."""
    _change(_reached(run, context, token, token_file, tls_ca, tls_name), "remove", shard, [])


@shards.command("give-up")
def give_up(
    run: Run,
    shard: Shard,
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Do without a shard whose host is lost: learners bring its fragments to the others, without outer momentum."""
    _change(_reached(run, context, token, token_file, tls_ca, tls_name), "give-up", shard, [])


def _reached(
    run: str, context: typer.Context, token: str, token_file: str, tls_ca: str, tls_name: str
) -> ClientOptions:
    from atoll.launch import reach

    shown = o.run_token(context, token, token_file)
    return reach(run, token=shown, tls_ca=tls_ca, tls_name=tls_name).options


def _change(options: ClientOptions, action: str, shard: str, fragments: list[int]) -> None:
    from atoll.launch import change_shards_of

    console = human(json_wanted=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True, highlight=False)

    say(change_shards_of(options, action, shard, fragments, say=say))
