from tests.backend.conftest import checkpoint_dir, one_thread

__all__ = ["checkpoint_dir", "one_thread"]
