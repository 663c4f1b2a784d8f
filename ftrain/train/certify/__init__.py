"""`ftrain certify`: the proof that a layout trains as one process does, for every parameter and every step.

layouts    text -> configs (pure)           planning   every pair of layouts, without bytes (pure)
messages   what parent and workers say      pool       the parent's side: warm processes
worker     the workers' side                steps      what a rank does: load, update, write everything
compare    whole arrays against bounds      verdict    the certificate
routes     the experts that were chosen     certify    all of it, in order
"""
