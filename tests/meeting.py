"""Where the processes of a test's job meet: no port is found free and then used, when another may have taken it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import TCPStore


@contextmanager
def meeting_point(processes: int) -> Iterator[dict[str, str]]:
    """What torchrun would put into the environment of so many processes, but for the rank of each; they meet in a store of
    this process's, on a port that the system chose when it was opened."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del store  # which closes it
