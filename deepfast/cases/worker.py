"""A process that runs kernels which may be wrong: `deepfast.proof.prove` starts it and reads its
lines.

Its argument is JSON. It writes one JSON line before each case and one after each item, so that the
parent knows what was running when the process ended or stopped answering. "memory" in an item's
line says that memory ran out.
"""

import json
import os
import sys
import threading
from typing import TextIO

import torch

from deepfast.cases import check, sizes
from deepfast.proof.table import widths


def _end_with_parent() -> None:
    """Ends this process when the parent's end of stdin closes, however the parent ended."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation"""


def _out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. Another process may have taken it, so this proves nothing wrong."""
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _failed(case: str, error: Exception) -> dict:
    """What is said of a case that raised an error."""
    said, memory = (str(error).strip().splitlines() or [""])[0], _out_of_memory(error)
    what = "out of memory" if memory else type(error).__name__
    return {"error": f"{case}: {what}: {said}", "memory": memory}


class Worker:
    """Runs the items of a job one by one.

    The job's fields: op, device, thorough, rounds, and items. An item is {"dtype", "backend"}, held
    to float64 in every case; or {"dtype", "width", "backends"}, timed.
    """

    def __init__(self, job: dict, out: TextIO):
        self.job, self.out = job, out
        self.device = torch.device(job["device"])
        self.item = 0

    def say(self, **line: object) -> None:
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()

    def begin(self, by: str, case: str) -> None:
        self.say(begin=self.item, backend=by, case=case)

    def _fault(self, by: str, dtype: torch.dtype) -> dict:
        case = None
        try:
            op, kind = self.job["op"], self.device.type
            for case in sizes.cases(op, kind, widths(op, kind), self.job["thorough"]):
                self.begin(by, case.name)
                found = check.fault(case, by, dtype, self.device)
                if found is not None:
                    return {"error": found}
        except Exception as error:
            self._leave_if_broken()
            return _failed(case.name if case else "the cases", error)
        return {"error": None}

    def _leave_if_broken(self) -> None:
        """After some errors a CUDA context answers no call any more. The parent then counts the
        item as failed and starts another process for the next one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _timed(self, names: list[str], dtype: torch.dtype, width: int) -> dict:
        case = sizes.typical(self.job["op"], width, self.device.type)
        running = names[0]

        def begin(by: str) -> None:
            nonlocal running
            running = by
            self.begin(by, case.name)

        try:
            found = check.seconds(case, names, dtype, self.device, begin, self.job["rounds"])
        except Exception as error:
            self._leave_if_broken()
            return {"backend": running, **_failed(case.name, error)}
        return {"seconds": found}

    def run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.ones(1, device=self.device).item()
        self.say(ready=True)
        for number, item in enumerate(self.job["items"]):
            self.item = number
            dtype = getattr(torch, item["dtype"])
            if "width" in item:
                result = self._timed(item["backends"], dtype, item["width"])
            else:
                result = self._fault(item["backend"], dtype)
            self.say(done=number, **result)


def main() -> None:
    # What libraries print must not come between the lines.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _end_with_parent()
    Worker(json.loads(sys.argv[1]), out).run()


if __name__ == "__main__":
    main()
