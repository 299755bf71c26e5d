"""Local retrieval: a thread pool over one packed array. The default without Ray."""

from ucm_ray.retrieval.packed import PackedQuery
from ucm_ray.retrieval.retriever import RetrievalFuture, Retriever


class RetrievalWorker(Retriever):
    """The seed's asynchronous retrieval worker: `retrieval_workers` threads, an LRU of `retrieval_cache_size` blocks.

    Unlike the seed it scores one contiguous array with a compiled kernel instead of stacking a vector per block, and
    answers all layers and requests of a step in one call (`submit`).
    """

    def submit(self, query: PackedQuery, deadline_s: float | None = None) -> RetrievalFuture:
        """Answers a packed query. A deadline is accepted for the interface's sake: nothing here waits for others."""
        future = RetrievalFuture()
        self._threads.submit(self._answer, query, future)
        return future

    def _submit_now(self, query, deadline_s):
        # Answer in this thread: a second task would wait for a free thread while this one holds the bank.
        future = RetrievalFuture()
        self._answer(query, future)
        return future

    def _answer(self, query: PackedQuery, future: RetrievalFuture) -> None:
        try:
            answer = self.bank.answer(query)
        except Exception as error:
            future.fail(error)
        else:
            future.settle(answer)
