import torch, sys
sys.path.insert(0,'.')
from benchmarks.gpu_inputs import VOCAB, make_control
from remote_dspark.kernels import naive, checks
from remote_dspark.kernels.rows import pack_control
from remote_dspark.kernels.sampled_head import *
from remote_dspark.kernels.markov_head import launch_markov_position, fill_bias_rows
from remote_dspark.kernels.graph_checks import check_graph_replays
print(check_graph_replays("cuda", 50_021, tile=2048), flush=True)
def show(tag,b,ids):
    q=b.q.double()*2**24
    print(tag,'err',b.error.tolist(),'count',b.count.flatten().tolist()[:10],'ids ok',(b.ids==ids).all(2).float().mean().item(),'sums',(q.sum(2)==2**24).float().mean().item(),'tok',b.token.flatten().tolist()[:4],'counter',b.counter.tolist(),'flag',b.flag.tolist(),flush=True)
def run(rows,shards,emit,positions=3):
    torch.manual_seed(77)
    st=HeadSettings(Tiling(VOCAB,2048,shards,4),emit_weights=emit)
    lg=(torch.randn(positions,rows,VOCAB,device='cuda')*3).to(torch.bfloat16)
    bias=torch.randn(rows,VOCAB,device='cuda').to(torch.bfloat16)
    c=make_control(rows); b=HeadBuffers(st,positions,rows,'cuda')
    ids=torch.stack([naive.select_support(naive.corrected_logits(r,bias),32)[0].int() for r in lg])
    def body():
        for s in range(positions): launch_position(st,b,s,lg[s],bias,c)
    b.poison(); body(); torch.cuda.synchronize(); show(f'eager rows={rows} shards={shards} emit={emit}',b,ids)
    b.poison(); body(); torch.cuda.synchronize(); show('  again',b,ids)
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): body()
    b.poison(); g.replay(); torch.cuda.synchronize(); show('  replay',b,ids)
    c[:,2]+=1
    b.poison(); g.replay(); torch.cuda.synchronize(); show('  replay2',b,ids)
for a in ((4,1,True),(4,1,False),(8,2,False)): run(*a)
def mk(V,tile,warps,rows,direct):
    gen=torch.Generator().manual_seed(0)
    w1,w2=((torch.randn(V,256,generator=gen)/4).to(torch.bfloat16).cuda().contiguous() for _ in range(2))
    cache=torch.zeros(2,V,dtype=torch.bfloat16,device='cuda'); slots=torch.full((V,),-1,dtype=torch.int32,device='cuda')
    case=checks.make_case(0,rows,V)
    prev=torch.arange(rows,dtype=torch.int32)*100+7
    bias=naive.markov_bias(w1[prev.long().cuda()],w2)
    want=naive.sampled_head(case.logits[:,:V].cuda(),bias,**{k:v.cuda() for k,v in case.fields.items()})
    st=HeadSettings(Tiling(V,tile,1,warps),emit_weights=True)
    old=Tiling.fills_threads
    if not direct: Tiling.fills_threads=lambda self,n: False
    b=HeadBuffers(st,1,rows,'cuda'); b.poison()
    launch_markov_position(st,b,0,case.logits.cuda(),pack_control(**case.fields).cuda(),prev.cuda(),w1,w2,slots,cache)
    torch.cuda.synchronize(); Tiling.fills_threads=old
    bad=(b.ids[0]!=want.ids.cuda()).sum().item()
    print('markov',V,tile,warps,rows,direct,'bad ids',bad,'err',b.error.tolist(),'count',b.count.tolist(),'got',b.ids[0,0,:6].tolist(),'want',want.ids[0,:6].tolist(),flush=True)
for a in ((129280,512,8,1,True),(129280,512,8,1,False),(129280,1024,8,1,True),(129280,1024,8,1,False),(129280,512,4,1,True),(129280,1024,8,4,True)): mk(*a)
