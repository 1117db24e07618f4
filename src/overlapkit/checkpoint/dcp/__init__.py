"""torch.distributed.checkpoint (DCP) with overlapkit's files: committed by rename, checksummed, no pickles.

For who calls dcp.save, dcp.async_save and dcp.load already:

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from overlapkit.checkpoint import (
        SafetensorsLoadPlanner,
        SafetensorsReader,
        SafetensorsSavePlanner,
        SafetensorsWriter,
    )


    class Training:  # what DCP calls Stateful
        def state_dict(self):
            found = get_state_dict(model, optimizer)
            return {"model": found[0], "optimizer": found[1]}

        def load_state_dict(self, state):
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )


    states = {"training": Training(), "scheduler": scheduler, "step": 100}
    planner = SafetensorsSavePlanner(enable_plan_caching=True)
    saving = dcp.async_save(
        states, checkpoint_id="runs/a/step-100", storage_writer=SafetensorsWriter(), planner=planner
    )
    saving.result()  # raises whatever went wrong on any rank

    states["step"] = 0
    dcp.load(
        states,
        checkpoint_id="runs/a/step-100",
        storage_reader=SafetensorsReader(),
        planner=SafetensorsLoadPlanner(),
    )

The planners are needed for values that are no tensors. A path ends in step-N, and either side reads the
other's checkpoints, at any number of ranks. Given `state = dict(model=model, optimizer=opt, ...)` there:

    Checkpointer's state          DCP's key
    "model", a module             model.<parameter>, model.<buffer>
    "optimizer"                   optimizer.state.<parameter>.<moment>; the parameter by its name in its
                                  module (get_optimizer_state_dict, flattened or not) or by its number
                                  (optimizer.state_dict())
                                  optimizer.param_groups, or optimizer.param_groups.<parameter>.<option>
    "loader", an object           loader, its state_dict() as one value; where that holds tensors, their
                                  paths joined by dots, and each part without tensors as one value
    "x", a tensor or a value      x, or as an object's state

`dcp.save({"model": model, "optimizer": opt, ...})` gives such keys, and so does a state_dict in their place;
random generators have none. Keys of dicts that hold tensors become strings, as always in DCP. Tied
parameters are written twice; of values each rank keeps its own, as with a Checkpointer.
"""

from overlapkit.checkpoint.dcp.planner import SafetensorsLoadPlanner, SafetensorsSavePlanner
from overlapkit.checkpoint.dcp.reader import SafetensorsReader
from overlapkit.checkpoint.dcp.writer import SafetensorsWriter

__all__ = ["SafetensorsLoadPlanner", "SafetensorsReader", "SafetensorsSavePlanner", "SafetensorsWriter"]
