"""The registered operators, the bodies that launch their kernels, and the choice between the two.

``bodies`` launch; ``schemas`` register them with ``torch.library``; ``operators`` pairs each body
with the registered form for compilers, autograd and modes.
"""
