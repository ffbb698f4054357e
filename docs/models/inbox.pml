/* The peer inbox of a physical drafter pair: two slots, epochs, acknowledgements, sticky errors.

   Checked exhaustively by scripts/check_models.sh:
     - no epoch is lost or taken twice: a rank reads exactly the message that its peer sent for that epoch, of the same
       incarnation, whole;
     - nothing is read before it was released, and no slot is written before its last content was acknowledged;
     - every fault (a rank that never launches, that dies in a chain, that times out, a wrong result, the last epoch)
       ends with an error on both ranks, as far as each still runs or is asked, and nobody waits for ever;
     - a chain that both ranks finish without an error had equal results in every position.

   What is modelled: `pair_exchange.exchange`, `await_signal` and `close_message` for one channel, DEPTH positions and the
   message that ends the chain, for CHAINS chains; payload, flags and acknowledgement are separate stores before the
   release of the signal. Messages of an earlier incarnation may lie in the inbox at the start. A wait may time out at any
   moment when the message is not there.

   MAY_DIE lets a rank end between two messages, before its first one too; MAY_ERR lets one rank compute a wrong result.

   What is not: sequential consistency is assumed, so that the release and acquire of the kernel, and its barriers, are
   taken for granted here (they are asserted in the compiled code); time as numbers; several channels. The host asks both
   ranks (HOST). -DMUTANT_x removes one rule; the script demands that each mutant fails. */

#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef CHAINS
#define CHAINS 2
#endif
#ifndef LIMIT
#define LIMIT 100          /* first epoch that does not exist */
#endif
#ifndef MAY_DIE
#define MAY_DIE false
#endif
#ifndef MAY_ERR
#define MAY_ERR false
#endif
#define STALE 7            /* a nonce of an earlier incarnation; this one is 1 */

#define TIMEOUT 1
#define MISMATCH 2
#define EXHAUSTED 4
#define FAULT 16

/* Inboxes by owner and slot: [2 * owner + slot]. */
byte payload[4];           /* epoch the candidates are of; 0 while they are being written */
byte ack[4];               /* result that is acknowledged */
byte signal_epoch[4];
byte signal_nonce[4];
byte fault[2];             /* written by the peer */
byte unread[4];            /* ghost: epoch that was released here and not yet consumed */

byte result[2];            /* last result of each rank, what its next message carries */
byte error[2];             /* sticky */
bool over[2];              /* takes part in nothing any more, without having failed by itself */
byte done[2];              /* chains finished */
byte results[2 * 16];      /* ghost: results by rank and epoch */
bool wrong_result = false; /* one rank computed something else, once */

#define PEER (1 - me)
#ifdef MUTANT_ONE_SLOT
#define SLOT(e) 0
#else
#define SLOT(e) ((e) & 1)
#endif
#define AT(owner, e) (2 * (owner) + SLOT(e))

/* One message: sends, waits, judges. `goes_on` says whether the channel does. */
inline message(e) {
  goes_on = false;
  code = 0;
  if
  :: e >= LIMIT -> code = EXHAUSTED
  :: else ->
     /* The slot's last content was acknowledged by the message of the epoch before, or there was none. */
     atomic {
       assert(unread[AT(PEER, e)] == 0);
#ifndef MUTANT_READ_BEFORE_RELEASE
       payload[AT(PEER, e)] = 0
#else
       signal_epoch[AT(PEER, e)] = e; signal_nonce[AT(PEER, e)] = 1; payload[AT(PEER, e)] = 0
#endif
     }
     payload[AT(PEER, e)] = e;
     ack[AT(PEER, e)] = result[me];
#ifndef MUTANT_READ_BEFORE_RELEASE
     atomic { signal_epoch[AT(PEER, e)] = e; signal_nonce[AT(PEER, e)] = 1; unread[AT(PEER, e)] = e }
#else
     unread[AT(PEER, e)] = e;
#endif
     here = false;
     if
#ifdef MUTANT_NO_NONCE
     :: signal_epoch[AT(me, e)] == e -> here = true
#elif defined(MUTANT_NO_EPOCH)
     :: signal_nonce[AT(me, e)] == 1 -> here = true
#else
     :: signal_epoch[AT(me, e)] == e && signal_nonce[AT(me, e)] == 1 -> here = true
#endif
     :: fault[me] != 0 ->
        /* A peer that stops after sending has released its message before its fault. */
        if
        :: signal_epoch[AT(me, e)] == e && signal_nonce[AT(me, e)] == 1 -> here = true
        :: else -> code = FAULT
        fi
     :: !(signal_epoch[AT(me, e)] == e && signal_nonce[AT(me, e)] == 1) -> code = TIMEOUT
     fi;
     if
     :: here ->
        atomic {
          assert(payload[AT(me, e)] == e);
          assert(unread[AT(me, e)] == e);
          seen = ack[AT(me, e)];
          unread[AT(me, e)] = 0
        }
        if
#ifndef MUTANT_NO_COMPARE
        :: seen != result[me] -> code = MISMATCH
#endif
        :: else
        fi
     :: else
     fi
  fi;
  if
  :: code != 0 ->
     error[me] = error[me] | code;
#ifndef MUTANT_SILENT
     fault[PEER] = code
#endif
  :: else -> goes_on = true
  fi
}

/* A rank launches its chains one after the other; it may never launch, or end between any two messages. */
proctype Rank(byte me) {
  byte epoch = 0;
  byte position; byte seen; byte code;
  bool here; bool goes_on = true;
  do
  :: goes_on && done[me] < CHAINS ->
     position = 0;
     do
     :: goes_on && position < DEPTH ->
        if
        :: true
        :: MAY_DIE -> over[me] = true; goto ended
        fi;
        message(epoch + 1);
        if
        :: goes_on ->
           epoch++;
           /* The union is the same on both ranks, so is the result; unless something is broken. */
           if
           :: result[me] = epoch
           :: !wrong_result && MAY_ERR -> atomic { wrong_result = true; result[me] = 100 + epoch }
           fi;
           results[16 * me + epoch] = result[me]
        :: else
        fi;
        position++
     :: else -> break
     od;
#ifndef MUTANT_NO_SETTLE
     if
     :: goes_on -> message(epoch + 1); if :: goes_on -> epoch++ :: else fi
     :: else
     fi;
#endif
     if
     :: goes_on -> done[me]++
     :: else
     fi
  :: else -> break
  od;
ended: skip
}

/* What the host sees: it asks both ranks, and a rank's answer includes what its peer reported. */
#define ERROR_OF(r) (error[r] != 0 || fault[r] != 0)

active proctype Host() {
  byte e;
  atomic {
    /* An earlier incarnation used the same memory. */
    if
    :: true
    :: signal_epoch[0] = 1; signal_nonce[0] = STALE; signal_epoch[3] = 1; signal_nonce[3] = STALE;
       signal_epoch[1] = 1; signal_nonce[1] = STALE
    fi;
    run Rank(0); run Rank(1)
  }
  timeout;
  /* Nothing moves any more: nobody waits, because a wait can always end. */
  atomic {
    /* A rank that is over has no error of its own; the other one has, unless it had finished before. */
    assert(!(over[0] || over[1]) || over[0] && over[1] || ERROR_OF(0) || ERROR_OF(1) || done[0] == CHAINS || done[1] == CHAINS);
    /* Every error is on both ranks. */
    assert(ERROR_OF(0) == ERROR_OF(1));
    /* Finished on both without an error: all results were equal. */
    if
    :: !ERROR_OF(0) && !ERROR_OF(1) && done[0] == CHAINS && done[1] == CHAINS ->
       e = 1;
       do
       :: e <= CHAINS * (DEPTH + 1) -> assert(results[e] == results[16 + e]); e++
       :: else -> break
       od
    :: else
    fi
  }
}
