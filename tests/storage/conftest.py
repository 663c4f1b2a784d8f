"""The contract suite lives in the package; its assertions must be rewritten as those of a test are. No example is timed."""

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("storage.contract")
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
