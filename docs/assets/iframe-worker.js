// The search runs in a worker, which browsers refuse to a page that is opened as a file. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.onload = resolve;
          script.onerror = reject;
          script.src = source;
          scope.document.head.append(script);
        });
      scope.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.ready = load(url);
    }

    async postMessage(data) {
      await this.ready;
      const scope = this.frame.contentWindow;
      scope.dispatchEvent(new scope.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
