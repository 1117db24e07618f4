"""Which test files are looked through for a test that catches a mutation, by where it is."""

_GROUND = ("tests/input/test_streams.py", "tests/checkpoint/test_streams.py", "tests/measure/test_logged.py")

LANES: dict[str, tuple[str, ...]] = {
    "lane.py": ("tests/test_lane.py", *_GROUND),
    "pinned.py": ("tests/test_pinned.py", *_GROUND),
    "span.py": ("tests/test_span.py", "tests/measure/test_clock.py", *_GROUND),
    "input/": (
        "tests/input/test_streams.py",
        "tests/input/test_fixed.py",
        "tests/input/test_landing.py",
        "tests/input/test_transfer.py",
        "tests/input/test_ahead.py",
        "tests/input/test_draws.py",
        "tests/input/test_iterator.py",
        "tests/input/test_uneven.py",
    ),
    "input/images/": ("tests/input/images/test_loader.py",),
    "checkpoint/": (
        "tests/checkpoint/test_streams.py",
        "tests/checkpoint/test_waits.py",
        "tests/checkpoint/test_ahead.py",
        "tests/checkpoint/test_late.py",
        "tests/checkpoint/test_first_save.py",
        "tests/checkpoint/test_checkpointer.py",
        "tests/checkpoint/test_deletion.py",
        "tests/checkpoint/test_retention.py",
        "tests/checkpoint/test_writer.py",
        "tests/checkpoint/test_turns.py",
        "tests/checkpoint/test_storage.py",
    ),
    "checkpoint/copying.py": ("tests/checkpoint/test_copying.py",),
    "checkpoint/stage.py": ("tests/test_optimizer_step.py",),
    "checkpoint/gather.py": (
        "tests/checkpoint/test_gather.py",
        "tests/checkpoint/test_dcp_exchange.py",
        "tests/checkpoint/exchange/test_importing.py",
    ),
    "checkpoint/preemption.py": ("tests/checkpoint/test_preemption.py",),
    "checkpoint/remote/": ("tests/checkpoint/remote/test_uploads.py",),
    "measure/": (
        "tests/measure/test_logged.py",
        "tests/measure/test_tracing.py",
        "tests/measure/test_clock.py",
    ),
    "optim/": ("tests/optim/test_adamw.py", "tests/optim/test_gradients.py"),
    "parallel/": (
        "tests/parallel/test_collectives.py",
        "tests/parallel/test_buckets.py",
        "tests/parallel/test_exchange.py",
        "tests/parallel/test_ring.py",
        "tests/parallel/test_traffic.py",
        "tests/parallel/test_accumulating.py",
        "tests/parallel/test_ddp.py",
        "tests/parallel/test_early.py",
        "tests/parallel/test_fsdp.py",
        "tests/parallel/test_failure.py",
    ),
    "plan/": ("tests/plan/test_probing.py", "tests/plan/test_profiling.py", "tests/plan/test_links.py"),
    "doctor/": (
        "tests/doctor/test_copying.py",
        "tests/doctor/test_ranks.py",
        "tests/doctor/test_gpus.py",
        "tests/doctor/test_command.py",
    ),
}


def files_of(module: str) -> tuple[str, ...]:
    """The test files for a module of the package: those of the narrowest lane that it is in come first."""
    lanes = sorted((lane for lane in LANES if module.startswith(lane)), key=len, reverse=True)
    return tuple(dict.fromkeys(file for lane in lanes for file in LANES[lane]))
