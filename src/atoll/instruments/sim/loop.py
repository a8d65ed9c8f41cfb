"""An event loop in virtual time: production's coroutines run on it as they are.

A simulated process that is made of asyncio code has one. It has no sockets and no threads. What production gives to a
thread takes as long as the world says; its work is done half-way, so that a process may die between a write and the
moment in which anybody hears of it. Everything happens in one order, which follows from the seed: tasks and futures
have numbers, because sets of them would else be walked in the order of their addresses.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.instruments.sim.process import Process

if TYPE_CHECKING:
    from atoll.instruments.sim.pipe import PipeEnd
    from atoll.instruments.sim.world import World

AT_ONCE_MAX = 1_000_000
"""Callbacks at one moment: more is somebody who goes round in circles."""
LAST_TURNS_MAX = 10_000
"""For the tasks of a dead process to unwind."""


class _Task(asyncio.Task[Any]):
    number: int

    def __new__(cls, *_arguments: Any, loop: VirtualLoop, **_named: Any) -> _Task:
        task = super().__new__(cls)
        task.number = loop.next_number()
        return task

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: VirtualLoop) -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.AbstractEventLoop):
    def __init__(self, process: LoopProcess) -> None:
        self._process = process
        self._clock = process.world.clock
        self._ready: deque[asyncio.Handle] = deque()
        self._running = self._planned = self._closed = False
        self._numbers = self._era = 0
        self._tasks: dict[_Task, None] = {}

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ------------------------------------------------------------ running

    def enter(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something inside this loop, and then whatever follows from it at this moment."""
        assert not self._running, "a process cannot be entered while it runs"
        self._running = True
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            action(*arguments)
            self._run_ready()
        finally:
            asyncio._set_running_loop(before)
            self._running = False

    def _run_ready(self) -> None:
        for _ in range(AT_ONCE_MAX):
            if not self._ready:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
        raise AssertionError(f"the process does not come to rest at {self._clock.now_ns} ns")

    def _turn(self) -> None:
        self._planned = False

    def end(self) -> None:
        """The process is dead. Its tasks unwind, and whatever they say or write goes nowhere."""
        self._closed = True
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for _ in range(LAST_TURNS_MAX):
                for task in list(self._tasks) if not self._ready else ():
                    task.cancel()
                if not self._ready:
                    break
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(before)
        self._ready.clear()

    async def rest(self) -> None:
        """Cancel every other task and every timer, as the end of `asyncio.run` does."""
        others = [task for task in self._tasks if task is not asyncio.current_task(self)]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._era += 1

    # ------------------------------------------------------------ what asyncio asks of a loop

    def time(self) -> float:
        return self._clock.now_ns / 1e9

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None, **_named: Any) -> Any:
        task = _Task(coro, loop=self, name=name or "task", context=context)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._running and not self._planned and not self._closed:
            self._planned = True
            self._clock.after(0, self._process.call, self._turn)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._closed:
            # Time goes on: who waits for a moment that is nearer than a nanosecond would else never reach it.
            at_ns = max(round(when * 1e9), self._clock.now_ns + (when > self.time()))
            self._clock.at(at_ns, self._process.call, self._ring, handle, self._era)
        return handle

    def _ring(self, handle: asyncio.TimerHandle, era: int) -> None:
        if not handle.cancelled() and era == self._era:
            self._ready.append(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asked by TimerHandle.cancel: nothing is kept of it here."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """On a thread of the process: done when half of its time is over, known when all of it is."""
        answer = self.create_future()
        takes_ns = self._process.takes_ns(_name_of(func))
        self._process.later(takes_ns // 2, self._work, answer, partial(func, *args), takes_ns - takes_ns // 2)
        return answer

    def _work(self, answer: asyncio.Future[Any], work: Callable[[], Any], rest_ns: int) -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        self._process.later(rest_ns, _tell, answer, result, error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What fails in a callback, which nobody waits for, must not fail in silence."""
        error = context.get("exception")
        if error is not None and context.get("handle") is not None and not self._closed:
            raise error

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    async def shutdown_asyncgens(self) -> None:
        """There is nothing to do."""


def _tell(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _name_of(func: Callable[..., Any]) -> str:
    """Of what runs on a thread; `asyncio.to_thread` has wrapped it once."""
    while isinstance(func, partial):
        func = func.args[0] if func.args and getattr(func.func, "__name__", "") == "run" else func.func
    return str(getattr(func, "__name__", ""))


class LoopProcess(Process):
    """A process whose code is production's, on a loop of its own."""

    place = ""
    """Where it runs."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.loop = VirtualLoop(self)  # type: ignore[abstract]  # there are no sockets here
        self.pipes: dict[PipeEnd, None] = {}
        """Its ends of streams to other parties."""

    def call(self, action: Callable[..., None], *arguments: Any) -> None:
        if self.dead:
            return
        if self.frozen:
            self._backlog.append((action, arguments))
        elif self.loop.is_running():
            self.loop.call_soon(action, *arguments)
        else:
            self.loop.enter(action, *arguments)

    def die(self) -> None:
        if not self.dead:
            super().die()
            self.loop.end()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self.loop.create_task(work)
        return task

    def takes_ns(self, what: str) -> int:
        """How long this takes on a thread."""
        return 100_000
