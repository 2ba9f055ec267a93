"""What every cache can do, whoever owns its pages.

The native core decides which slot. The pools hold the tensors. A codec fills them. This module brings the
three together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, TypeVarTuple

from radixstate import _native
from radixstate._native import CacheBase as NativeBase
from radixstate._native import Freed, Match, Namespace, Stats, Step, Stored, Usage
from radixstate.errors import ConfigError, OutOfSlotsError
from radixstate.finiteness import Proofs, Verdict
from radixstate.owner import Owner, leave
from radixstate.results import Skipped, skipped
from radixstate.states import ActivePool, CheckpointPool, StateSpec
from radixstate.tokens import Tokens, sized
from radixstate.transfer import Transfer

if TYPE_CHECKING:
    from radixstate._native import PendingHandle

PoolName = Literal["kv", "active", "checkpoint", "checkpoints"]
"""What a call takes. The last two are one pool, which answers and errors call `checkpoint`."""
Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")
Native = TypeVar("Native", bound=NativeBase)


class CacheBase(Owner, Generic[Native]):
    """What `PrefixCache` and `EngineCache` share.

    Attributes:
        spec: what a slot holds.
        page_size: tokens of a page.
        active: full-precision states of running requests.
        checkpoints: encoded states of cached prefixes.
    """

    def __init__(
        self, native: Native, spec: StateSpec, page_size: int, active: ActivePool, checkpoints: CheckpointPool
    ) -> None:
        """Brings a core and its tensors together."""
        self._native = native
        self.spec = spec
        self.page_size = page_size
        self.active = active
        self.checkpoints = checkpoints
        self._transfer = Transfer(active, checkpoints)
        self._proofs = Proofs(native)
        active.belong_to(self)

    def __repr__(self) -> str:
        """Slots in use of each pool."""
        return repr(self._native).replace("Cache", type(self).__name__, 1)

    def legal_depth(self, tokens: int) -> int:
        """The deepest depth, at most `tokens`, at which a state may be cached."""
        return self._native.legal_depth(tokens)

    def lookup(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        max_length: int | None = None,
        whole: bool = False,
    ) -> Match:
        """How much of a prompt can be reused. Pins nothing and changes nothing that eviction looks at.

        Args:
            tokens: the prompt.
            namespace: prefixes of other namespaces never match.
            max_length: find at most so many tokens. Without it, the match is still shorter than the prompt: its last
                token is to be computed.
            whole: the tokens are no prompt. Find all of them if they are cached; `max_length` must be None.

        Raises:
            ConfigError: `whole` with a `max_length`.
            EmptyPromptError: `tokens` is empty.
            TokenRangeError: a token is not in 0..2**32.
        """
        if whole and max_length is not None:
            raise ConfigError(f"whole=True finds all tokens, max_length={max_length} contradicts it")
        if self._proofs.verdicts:
            tokens = self._proven(tokens, namespace, max_length, whole=whole)
        if whole:
            return self._native.lookup_whole(tokens, namespace)
        return self._native.lookup(tokens, namespace=namespace, max_length=max_length)

    def touch(self, tokens: Tokens, *, namespace: Namespace | None = None) -> int:
        """Makes the deepest state on the path of `tokens` as recent as if a request had continued it.

        For requests that wait, whose prefix should not be the next to go.

        Returns:
            The depth of that state, 0 if there is none.
        """
        return self._native.touch(tokens, namespace)

    def settle(self, *, wait: bool = False) -> None:
        """Reads what is known by now of states that were stored without a step: whether they are finite.

        Until then they can't be hit, and their pages can't be evicted. Ranks of a group must not poll: what is known
        by now differs between them.

        Args:
            wait: for the stores that have not run.
        """
        if not self._proofs:
            return
        if wait:
            self._proofs.report(None)
        else:
            self._proofs.report_done()

    def _proven(
        self, tokens: Tokens, namespace: Namespace | None, max_length: int | None, *, whole: bool = False
    ) -> Tokens:
        """If these tokens could hit a state that is not yet known to be finite, waits until it is known.

        Returns the tokens; an iterator is read into a list.
        """
        if not self._proofs:
            return tokens
        tokens = sized(tokens)
        if whole:
            found = self._native.lookup_whole(tokens, namespace)
        else:
            found = self._native.lookup(tokens, namespace=namespace, max_length=max_length)
        if found.not_ready:
            self._proofs.report(None)
        return tokens

    def _with_room(self, call: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Makes a call that takes slots. If there are too few, reads the proofs that are out, and calls again."""
        try:
            return call(*arguments)
        except OutOfSlotsError:
            if not self._proofs:
                raise
            self._proofs.report(None)
            return call(*arguments)

    def _with_slot(
        self, reserved: PendingHandle | _native.Skipped, again: Callable[[], PendingHandle | _native.Skipped]
    ) -> PendingHandle | _native.Skipped:
        """If there was no slot, reads the proofs that are out, which may free some, and asks again."""
        if isinstance(reserved, _native.Skipped) and reserved.reason == "no_room" and self._proofs:
            self._proofs.report(None)
            return again()
        return reserved

    def _encode(self, pairs: list[tuple[int, int]]) -> list[Verdict]:
        """Stores active slots into checkpoint slots."""
        if not pairs:
            return []
        finite = self._transfer.store(pairs)
        return [Verdict(finite, i) for i in range(len(pairs))]

    def _may_enter(self, pending: PendingHandle, verdict: Verdict) -> bool:
        """Whether an encoded state may enter the tree. One that is not known to be finite will be asked for."""
        if verdict.known:
            return verdict.is_finite()
        self._proofs.expect(pending.slot, verdict)
        return True

    def _entered(
        self, pending: PendingHandle, verdict: Verdict, outcome: Stored | _native.Skipped
    ) -> Stored | Skipped:
        """What became of an encoded state. Of one that was not stored nobody asks whether it is finite."""
        if isinstance(outcome, _native.Skipped):
            self._proofs.forget(pending.slot, verdict)
            return skipped(outcome)
        return outcome

    def evict(self, pool: PoolName, n: int) -> Freed:
        """Frees at least `n` units of a pool if it can. Says what it really freed; that is usable at once.

        Args:
            pool: `kv` or `checkpoint`; of `active` nothing can be evicted.
            n: pages, or states.
        """
        if self._proofs:
            self._proofs.report(None)
        return self._native.evict(pool, n)

    def reset(self) -> None:
        """Lookups see an empty cache at once; running sequences keep what they hold, and store nothing."""
        self._native.reset()

    def begin_step(self) -> Step:
        """Declares work in flight: what is given back from now on waits for its end. See `step`.

        Keep the handle until the step is retired: dropping it earlier cancels the step.
        """
        return self._native.begin_step()

    def retire_step(self, step: Step | int, invalid: Iterable[Stored] = (), *, failed: bool = False) -> None:
        """A step has ended, in any order; repeating it changes nothing.

        If `invalid` or the wait for a device raises, the step has ended as well: every state stored in it is
        withdrawn, and the error goes on.

        Args:
            step: from `begin_step`, or its number.
            invalid: states that were not finite.
            failed: its work did not run, or not to its end: every state stored in it (`Stored.step`) is withdrawn.
                A state that a later step computed from what is lost is not: that step has failed as well.

        Raises:
            UnknownStepError: no such step was begun.
            WrongCacheError: another cache began `step`, or stored one of `invalid`; the step goes on.
        """
        known: list[Stored] = []
        try:
            known.extend(invalid)
            if self._proofs and not failed:
                self._proofs.report(index(step))
        except BaseException:
            self._native.cancel_step(step, known)
            raise
        if failed:
            self._native.cancel_step(step, known)
        else:
            self._native.retire_step(step, known)

    def invalidate(self, stored: Stored) -> None:
        """Withdraws a stored state that turned out not to be finite. Repeating it changes nothing.

        The pages that the tree got with it are as suspect: lookups no longer find them, or any state whose path
        they lie on. Sequences that share them keep them to their end and store nothing further.

        Raises:
            WrongCacheError: another cache stored it.
        """
        self._native.invalidate(stored)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """One step, begun on entry and retired on exit, as failed when its body raises.

        Overlapping ones use `begin_step`, `retire_step`.
        """
        step = self.begin_step()
        try:
            yield step
        except BaseException as error:
            leave(lambda: self.retire_step(step, failed=True), error)
            raise
        self.retire_step(step)

    def stats(self) -> Stats:
        """All counters since the cache was made, and the bytes in use."""
        return self._native.stats()

    def usage(self, pool: PoolName) -> Usage:
        """Where the slots of a pool are: capacity = free + held + evictable + pinned + retiring.

        Args:
            pool: `kv`, `active` or `checkpoint`.
        """
        return self._native.usage(pool)

    def digest(self) -> int:
        """One number for every decision so far, to be compared between the ranks of a group.

        Equal after the same calls, different once the ranks have diverged; cheap enough for every step. It
        covers what each call took, reused, stored, evicted, ended or lacked. A dropped sequence counts from
        the cache's next call on: ranks whose garbage collectors drop at other moments should `finish`.
        """
        return self._native.digest()

    def draw(self) -> str:
        """A text picture of every prefix that lookups can reach, with the states at their ends; 64 levels at most."""
        return self._native.draw()

    def check(self, engine_free: Iterable[int] | None = None) -> None:
        """Recomputes every invariant; with `engine_free` also that no page free there is adopted here.

        `engine_free` are ids of an engine that names its pages; where the cache numbers them, leave it out.

        Raises:
            CheckError: something is wrong; `violations` lists all of it.
        """
        self._native.check(engine_free)
