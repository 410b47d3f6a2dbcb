"""What user code keeps between runs of a step, which a pipeline runs for each part of a micro-batch and each stage.

| value | in | what happens to it |
|---|---|---|
| number, string, enumeration, None, buffer | attributes beside the layers, and dicts there | followed |
| the same | attributes of layers of torch's classes | followed |
| module | modules beside the layers | followed |
| the same | attributes of other layers, hooks, variables of hooks | refused if it changes twice |
| the same | dicts of more than 100 items into which no step stores any | watched |
| object, tuple, tensor that takes another's place | attributes, dicts, lists | put back, then partial |
| what takes the place of nothing, or of None | attributes, dicts | a cache: put back, stays if runs agree |
| number in what is not an attribute or a dict in one | objects, lists, globals, classes | watched |
| content of an array, a tensor, a closure | anywhere | watched |
| tensor, float that hooks of layers set | variables, objects (`hook_slots`) | partial |
| what layers and hooks set in evaluations | attributes, variables, objects (`evaluated`) | sent to all ranks |
| list that grows | attributes | refused; in globals it may |
| parameter or buffer that is changed in place | modules | refused; metrics and statistics count parts |
| iterator | attributes | gives no items in a step |
| generator of random numbers | attributes, containers, globals | put back (`draws`): all runs draw the same |

- followed (`found`): each run begins with what the micro-batch found, and all leave the same, which stays.
- watched (`watch`): refused by name if it changes. Only in the first four micro-batches and in those whose number is a
  power of two; in every one what modules of the program hold whose code stores something (`step_code.stores`).
- put back: each run of a micro-batch that is watched begins with what the micro-batch found. In layers that set objects
  numbers are put back too, and what their attributes hold in each micro-batch; alike in all runs, it stays.
- partial: it may be used within the run, and is a `Refusing` afterwards, on all ranks and in the program.

How long it is kept: a `Found` of the start, the call and the end of a run for one micro-batch; a `Snapshot` of the
start and of the last run of each stage for one that is watched; for the whole fit what was partial (`Watch._partial`),
the layers that set objects (`Watch.setting`), and the names of what layers have changed once.

`microbatch_state` says when all this happens, `watch` what is compared, `snapshot` what is searched, and `marks` what
tells that a value has changed.
"""
