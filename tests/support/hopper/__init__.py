"""An emulator of the Hopper kernel: the source of `quire.kernels.gluon` on the CPU, in Triton's interpreter. For tests alone.

`install` imports the kernel with stand-ins for Gluon's modules. A tensor is an array of the interpreter, and layouts are ignored.
What the interpreter has not is emulated here:

    partitions.py      the partitions of `warp_specialize`, which take turns at barriers, and what each of them knows of the others
    shared_memory.py   shared memory: accesses are checked for races with other partitions and asynchronous operations
    barriers.py        mbarriers: arrivals, expected bytes, phases
    copies.py          asynchronous copies, row by row and by the tensor memory accelerator
    products.py        asynchronous matrix products
    language.py        the stand-ins for Gluon's modules

Nothing depends on the order in which partitions run: an access is an error if no chain of barriers orders it after the writes (or,
for a write, the reads and writes) of the same elements by others. So a wait that is missing is found also where, by luck, the data
would have been there. What this cannot find: errors of layouts, registers and instructions, which the compiler checks; and that
the threads of a partition, which run as one here, are not synchronised with each other, apart from what arrives at a barrier and
what starts a copy of a box.
"""

from support.hopper.language import install

__all__ = ["install"]
