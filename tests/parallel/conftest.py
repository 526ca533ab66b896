import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank():
    """The process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
