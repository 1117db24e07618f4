"""`overlapkit plan`: a step at any number of ranks, and the plan that makes it shortest."""

from typing import Annotated, Any

import typer

EXIT_STATUS = "Exit status: 0 simulated, 1 a file cannot be read, 2 wrong usage (no plan fits, among others)."

Profile = Annotated[str, typer.Argument(help="JSON of plan.profile(model, batch).save().")]
Ranks = Annotated[str, typer.Option(help="Numbers of ranks, as 8,64,512; or 2..16384, by doubling.")]
LinkFile = Annotated[str | None, typer.Option(help="JSON of plan.probe_link(mesh).save().")]
NodeRate = Annotated[float | None, typer.Option(help="Without --link: GB/s of a ring inside a node.")]
NetworkRate = Annotated[float | None, typer.Option(help="GB/s between nodes for each rank (its port).")]

_PART_OF = {
    **dict.fromkeys(("network_gb_s", "copy_gb_s", "node_size", "node_us"), "node_gb_s"),
    "network_us": "network_gb_s",
    "memory_gib": "choose",
    **dict.fromkeys(("restart_s", "stall_s", "write_s"), "mtbf_h"),
}
"""Options that say nothing without another one."""


def plan(
    context: typer.Context,
    profile: Profile,
    ranks: Ranks = "2..16384",
    link: LinkFile = None,
    node_gb_s: NodeRate = None,
    network_gb_s: NetworkRate = None,
    copy_gb_s: Annotated[float | None, typer.Option(help="GB/s of copies into and out of buffers.")] = None,
    node_size: Annotated[int, typer.Option(help="Ranks a node.")] = 8,
    node_us: Annotated[float, typer.Option(help="Latency of a hop inside a node.")] = 2.0,
    network_us: Annotated[float, typer.Option(help="Latency of a hop between nodes.")] = 6.0,
    wrapper: Annotated[str, typer.Option(help="shard (FSDP2) or replicate (DDP).")] = "shard",
    shards: Annotated[int | None, typer.Option(help="Ranks that share a parameter; all.")] = None,
    plan_file: Annotated[str | None, typer.Option("--plan", help="JSON of a ShardPlan to simulate.")] = None,
    choose: Annotated[
        str | None, typer.Option(help="Choose the best plan for the first number of ranks; write it here.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="What a chosen plan may take of a rank.")] = None,
    param_bytes: Annotated[int, typer.Option(help="Bytes an element that is gathered.")] = 4,
    reduce_bytes: Annotated[int, typer.Option(help="Bytes an element that is reduced.")] = 4,
    spread: Annotated[float, typer.Option(help="Standard deviation of the ranks' compute times.")] = 0.0,
    optimizer_ms: Annotated[float, typer.Option(help="Of a step for all parameters on one rank.")] = 0.0,
    mtbf_h: Annotated[float | None, typer.Option(help="Hours between two failures of one rank.")] = None,
    restart_s: Annotated[float, typer.Option(help="From a failure to the next step.")] = 300.0,
    stall_s: Annotated[float, typer.Option(help="What a save costs the steps.")] = 0.0,
    write_s: Annotated[float, typer.Option(help="Until a save is committed.")] = 0.0,
    plot: Annotated[str | None, typer.Option(help="Draw step and exposed share into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> bool:
    """Play a step at any number of ranks: time, exposed share, memory, break-even; goodput with --mtbf-h."""
    from overlapkit.checkpoint import tables
    from overlapkit.parallel import ShardPlan
    from overlapkit.plan import Failures, scale
    from overlapkit.plan import Profile as Measured
    from overlapkit.plan import choose as choose_plan
    from overlapkit.plan.arguments import check_amount

    _check_given(context)
    measured, worlds = Measured.load(profile), _worlds(ranks)
    wire = _link(link, node_gb_s, network_gb_s, copy_gb_s, node_size, node_us, network_us)
    failures = None if mtbf_h is None else Failures(mtbf_h * 3600, restart_s, stall_s, write_s)
    options: dict[str, Any] = {
        "wrapper": wrapper,
        "shards": shards,
        "param_bytes": param_bytes,
        "reduce_bytes": reduce_bytes,
        "spread": spread,
        "optimizer_s": optimizer_ms / 1e3,
        "failures": failures,
    }
    chosen = None if plan_file is None else ShardPlan.load(plan_file)
    if choose is not None:
        if chosen is not None:
            raise ValueError(f"--plan {plan_file} and --choose {choose}: give one of them")
        if memory_gib is not None:
            check_amount("memory_gib", memory_gib, above=0)
        memory = None if memory_gib is None else round(memory_gib * 2**30)
        chosen = choose_plan(measured, wire, memory, world=worlds[0], **options)
        chosen.save(choose)
    found = scale(measured, wire, worlds, plan=chosen, **options)
    if plot is not None:
        found.plot(plot)
    if as_json:
        tables.print_json(found.to_dict())
    else:
        print(found)
    return True


def _check_given(context: typer.Context) -> None:
    """No option is dropped in silence."""
    for option, whole in _PART_OF.items():
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE" and context.params[whole] is None:
            part, of = (f"--{name.replace('_', '-')}" for name in (option, whole))
            raise ValueError(f"{part} has no effect without {of}: leave it out, or give {of} as well")


def _worlds(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    try:
        if not dots:
            return [int(word) for word in text.split(",")]
        worlds = [int(first)]
        if int(last) < worlds[0]:
            raise ValueError
        while worlds[-1] * 2 <= int(last) and worlds[-1] > 0:
            worlds.append(worlds[-1] * 2)
        return worlds
    except ValueError:
        raise ValueError(f"--ranks {text}: give numbers as 8,64,512, or a range as 2..16384") from None


def _link(
    file: str | None,
    node: float | None,
    network: float | None,
    copy: float | None,
    size: int,
    node_us: float,
    network_us: float,
) -> Any:
    from overlapkit.plan import Fabric, LinkTable, Wire

    if (file is None) == (node is None):
        raise ValueError(
            "give either --link FILE (measured) or --node-gb-s (and --network-gb-s) of a cluster"
        )
    if file is not None:
        return LinkTable.load(file)
    assert node is not None
    across = None if network is None else Wire(network * 1e9, network_us * 1e-6)
    words = f"{node:g} GB/s in nodes of {size}"
    if network is not None:
        words += f", {network:g} GB/s a rank between them"
    copies = None if copy is None else copy * 1e9
    return Fabric(Wire(node * 1e9, node_us * 1e-6), across, size, f"{words} (given)", copies)
