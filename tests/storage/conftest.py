"""The contract suite lives in the package; its assertions must be rewritten as those of a test are."""

import pytest

pytest.register_assert_rewrite("storage.contract")
