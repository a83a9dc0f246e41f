"""Reading files of torch.save without executing their pickles.

A pickle is a program. Our interpreter (interpreter.py) runs it, and can make only plain containers
and scalars, descriptions of tensors, and inert stand-ins for the classes that models are made of
(values.py, names.py). It imports no module, calls no class, and looks nothing up by attribute.
torch is imported only when a tensor is read.

values.py -> names.py -> interpreter.py -> torch_file.py (with zip_archive.py) -> module_tree.py
"""
