import sys; sys.path.insert(0,'/work/main')
import warnings; warnings.simplefilter('ignore')
import torch, time, numpy as np
from benchmarks import networks as N
import tnsim
torch.manual_seed(0)
name=sys.argv[1]
made,inputs=N.NETWORKS[name](); a=made.eval(); b=N.other(a,.2)
metric=() if inputs is None else (tnsim.Empirical(inputs),)
for k in range(2):
    t,p=time.time(),time.process_time(); c=tnsim.change(a,b,*metric); print(k,'wall',time.time()-t,'cpu',time.process_time()-p)
print(c)
if len(sys.argv)>2:
    import cProfile,pstats
    p=cProfile.Profile(); p.enable(); tnsim.change(b,a,*metric); p.disable(); pstats.Stats(p).sort_stats('tottime').print_stats(18)
