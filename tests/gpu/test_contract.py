"""What tests/kernel asks of the CPU kernel, asked of the CUDA kernel: the same functions, on another backend."""

import pytest

from tests.kernel.test_accumulate import (  # noqa: F401
    added,
    test_a_buffer_that_does_not_fit_is_left_to_autograd,
    test_a_graph_that_is_kept_adds_twice,
    test_a_weight_computed_from_a_parameter,
    test_autograd_sees_that_a_buffer_changed,
    test_bits_are_those_of_adding_afterwards,
    test_checkpointed,
    test_hooks_see_gradients,
    test_megatrons_flag_says_that_main_grad_has_it,
    test_what_asks_for_other_gradients_leaves_buffers_alone,
)
from tests.kernel.test_bits import (  # noqa: F401
    base,
    problem,
    test_ep_sizes,
    test_inference_gives_the_bits_of_training,
    test_runs,
    test_settings,
)
from tests.kernel.test_degenerate import (  # noqa: F401
    test_checkpointing,
    test_everything_on_one_rank,
    test_frozen_parts,
    test_identical_tokens,
    test_masked_routes,
    test_one_rank_wants_dx_the_other_does_not,
    test_ragged_ranks,
    test_repeated_experts,
    test_ring_bounds_what_is_saved,
    test_saved_shapes_do_not_depend_on_routing,
    test_second_backward,
    test_two_calls_in_flight,
)
from tests.kernel.test_parity import (  # noqa: F401
    test_bf16,
    test_clamped_swiglu,
    test_nan_is_not_hidden,
    test_ring_smaller_than_the_rows,
    test_route_weights_of_the_models_dtype,
    test_scaled_inputs,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_backend"), pytest.mark.timeout(60)]
