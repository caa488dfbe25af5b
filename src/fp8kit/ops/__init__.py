"""The registered operators, the bodies that launch their kernels, and the choice between the two.

``bodies`` launch kernels; ``schemas`` registers operators with ``torch.library``; ``operators``
pairs each body with its registered form, which compilers, autograd and modes call.
"""
