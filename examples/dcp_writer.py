"""An existing torch.distributed.checkpoint call on ftrain's storage: only its writer (and reader) changes.

python examples/dcp_writer.py runs/dcp        then: ftrain ckpt ls runs/dcp; ftrain ckpt verify runs/dcp
"""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ftrain


def main(url: str) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()

    held, slots = get_state_dict(model, optimizer)
    dcp.save({"model": held, "optimizer": slots, "step": 1}, storage_writer=ftrain.DcpWriter(url, step=1), no_dist=True)

    other = torch.nn.Linear(64, 64)
    others = torch.optim.AdamW(other.parameters(), lr=7.0)
    held, slots = get_state_dict(other, others)
    state = {"model": held, "optimizer": slots, "step": 0}
    dcp.load(state, storage_reader=ftrain.DcpReader(url), no_dist=True)
    set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    print(f"step {state['step']}, lr {others.param_groups[0]['lr']}: {'the same' if equal else 'something else'}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/dcp")
