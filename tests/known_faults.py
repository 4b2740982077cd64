"""Tests of what is known to be wrong: they must fail until it is mended, then their line goes."""

KNOWN_FAULTS = {
    "test_lifecycle.py::test_a_post_accumulate_hook_of_the_user_may_change_grad[after-": (
        "a user's hook that changes .grad within backward is taken for a foreign clip, with a warning"
    ),
    "test_lifecycle.py::test_memory_that_ran_out_at_any_allocation_of_a_step_changes_nothing[": (
        "out of memory in a closing step() comes after the micro-batch was moved into the window"
    ),
    "test_distributed.py::test_under_ddp_the_wrapper_is_the_plain_loop[no_sync": (
        "under no_sync() step() takes gradients that DDP has not reduced"
    ),
    "test_distributed.py::test_x01_synchronised_on_the_last_micro_batch[last]": "the same",
    "test_distributed.py::test_x01_a_short_last_window[last]": "the same",
    "test_distributed.py::test_l04_gradients_that_are_views_of_buckets[last-": "the same",
    "test_distributed.py::test_under_fsdp2_the_wrapper_is_the_plain_loop[": "DTensor is refused",
}
