"""Reading what torch.save wrote without running any of it.

A pickle is a program. This one is interpreted by us (interpreter.py), and can make nothing but
plain containers and scalars, descriptions of tensors, and inert stand-ins for classes that models
are made of (values.py, names.py): no module is imported, no class is called, nothing is looked up
by attribute. torch is imported when a tensor is read, not before.

values.py -> names.py -> interpreter.py -> torch_file.py (with zip_archive.py) -> module_tree.py
"""
