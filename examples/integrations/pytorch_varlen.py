"""`torch.nn.attention.varlen` on Quire: a mixed batch over pages, chosen by name. torch itself has no CPU kernel for this."""

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

import quire.integrations.pytorch  # registers the name
from quire import reference

torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
PAGES, PAGE_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM = 16, 16, 8, 2, 64

activate_flash_attention_impl("quire")  # the line that changes

k_pages, v_pages = torch.randn(2, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
block_table = torch.tensor([[3, 7, 1], [9, 0, 0]], dtype=torch.int32, device=DEVICE)
lengths = torch.tensor([41, 12], dtype=torch.int32, device=DEVICE)  # of each sequence, with its new tokens
starts = torch.tensor([0, 1, 13], dtype=torch.int32, device=DEVICE)  # one token decodes, twelve are a prompt
q = torch.randn(13, Q_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
out = varlen_attn(
    q, k_pages, v_pages, starts, None, 12, 41, window_size=(-1, 0), enable_gqa=True, seqused_k=lengths, block_table=block_table
)

# The row that decodes, in float64 over its 41 keys.
k, v = (pages[block_table[0]].flatten(0, 1)[:41].cpu() for pages in (k_pages, v_pages))
error = (out[:1].cpu() - reference.attention(q[:1].cpu(), k, v)[0]).abs().max().item()
print(f"varlen_attn on {DEVICE} with {quire.integrations.pytorch.NAME}: off by {error:.1e} from float64")
assert error < (1e-5 if DTYPE is torch.float32 else 1e-2)

restore_flash_attention_impl()  # torch's own kernel again
